"""A conversation and what a model answers in it: messages, tools, reasoning and calls; the same for every API."""

from gateway.conversation.answer_format import NUM_PROMPT_END_TOKENS, SPECIAL, AnswerFormat
from gateway.conversation.answer_parser import AnswerParser
from gateway.conversation.events import (
    AnswerEvent,
    AnswerPart,
    AnswerParts,
    ArgumentsDelta,
    CallBegins,
    CallEnds,
    Reasoning,
    Text,
)
from gateway.conversation.formats.choice import FORMAT_NAMES, answer_format_of
from gateway.conversation.guided_schema import checked_response_format, with_limited_spaces
from gateway.conversation.lark import Vocabulary
from gateway.conversation.messages import (
    NO_ARGUMENTS,
    ChatMessage,
    Conversation,
    ReasoningOptions,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
    has_system_texts,
    results_in_order,
    stricter_forms,
    with_descriptions,
    with_system_first,
)

__all__ = [
    "FORMAT_NAMES",
    "NO_ARGUMENTS",
    "NUM_PROMPT_END_TOKENS",
    "SPECIAL",
    "AnswerEvent",
    "AnswerFormat",
    "AnswerParser",
    "AnswerPart",
    "AnswerParts",
    "ArgumentsDelta",
    "CallBegins",
    "CallEnds",
    "ChatMessage",
    "Conversation",
    "Reasoning",
    "ReasoningOptions",
    "Text",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolUse",
    "Vocabulary",
    "answer_format_of",
    "checked_response_format",
    "has_system_texts",
    "results_in_order",
    "stricter_forms",
    "with_descriptions",
    "with_limited_spaces",
    "with_system_first",
]
