"""Anthropic's Messages API: its requests as our own values, and the shapes of its answers."""
