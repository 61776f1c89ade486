"""The HTTP frontend: OpenAI's API as its clients know it, and pages for operators and browsers."""
