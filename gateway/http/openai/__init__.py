"""OpenAI's API: what its requests mean here, and the shapes of its answers."""
