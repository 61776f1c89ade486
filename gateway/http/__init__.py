"""The HTTP frontend: OpenAI's and Anthropic's APIs, Baton's own paths for operators, and pages for browsers."""
