"""Dialect: whose conventions a path follows where these reach beyond its route: errors, ids and credentials."""

from enum import Enum

MESSAGES_PATH = "/v1/messages"


class Dialect(Enum):
    """Whose clients call a path."""

    OPENAI = "openai"
    """Also of Baton's own paths."""
    ANTHROPIC = "anthropic"


def dialect_of(path: str) -> Dialect:
    """Known from the path alone, so that it holds for requests that are refused before they are routed."""
    is_messages = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return Dialect.ANTHROPIC if is_messages else Dialect.OPENAI
