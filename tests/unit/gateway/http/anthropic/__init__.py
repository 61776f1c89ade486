"""Anthropic's Messages API, module by module."""
