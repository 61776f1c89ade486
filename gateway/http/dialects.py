"""Dialect: says whether errors, ids and credentials of a path follow OpenAI's or Anthropic's conventions."""

from enum import Enum

MESSAGES_PATH = "/v1/messages"


class Dialect(Enum):
    """The vendor whose conventions a path follows."""

    OPENAI = "openai"
    """Baton's own paths use this dialect, too."""
    ANTHROPIC = "anthropic"


def dialect_of(path: str) -> Dialect:
    """The dialect of a path. It depends only on the path, so it is also known for requests that are refused before
    routing."""
    is_messages = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return Dialect.ANTHROPIC if is_messages else Dialect.OPENAI
