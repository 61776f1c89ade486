"""OpenAI's Responses API: conversations of items, answers as typed events, and responses that are kept for a while."""
