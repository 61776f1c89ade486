"""A conversation and what a model answers in it: messages, tools, reasoning and calls; the same for every API."""

from gateway.conversation.answer_format import AnswerFormat, AnswerParser, answer_format_of, new_plain_parser
from gateway.conversation.events import (
    AnswerEvent,
    AnswerParts,
    ArgumentsDelta,
    CallBegins,
    CallEnds,
    Reasoning,
    Text,
)
from gateway.conversation.messages import ChatMessage, Conversation, Tool, ToolCall, ToolChoice, ToolUse

__all__ = [
    "AnswerEvent",
    "AnswerFormat",
    "AnswerParser",
    "AnswerParts",
    "ArgumentsDelta",
    "CallBegins",
    "CallEnds",
    "ChatMessage",
    "Conversation",
    "Reasoning",
    "Text",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolUse",
    "answer_format_of",
    "new_plain_parser",
]
