"""The HTTP door: OpenAI's API as its clients know it, and what operators and browsers look at."""
