"""A conversation as a value, the same for every API: its messages, which a model continues."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model continues with an assistant's turn."""

    messages: tuple[ChatMessage, ...]
