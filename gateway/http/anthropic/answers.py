"""The shapes of Anthropic's answers and events; /openapi.json describes them from here.

`whole` and `events` write the JSON of answers in pieces. Tests compare that JSON with the classes below.
"""

from dataclasses import dataclass
from typing import Any, Literal

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


@dataclass(frozen=True, slots=True)
class OutputTokensDetails:
    """Details of the answer's tokens."""

    thinking_tokens: int
    """Tokens of thinking and of the tags around it, whether the client gets to see them or not."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer. The prompt's are in `input_tokens` or in `cache_read_input_tokens`, never in both."""

    input_tokens: int
    """Computed for this answer."""
    cache_creation_input_tokens: Literal[0]
    """Writing to a prefix cache is part of computing a prompt, and is not counted apart."""
    cache_read_input_tokens: int
    """Found in a prefix cache."""
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"] = "standard"


@dataclass(frozen=True, slots=True)
class Text:
    """What the user is to read."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]
    """Nothing is signed here."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Text | Thinking | ToolUse


@dataclass(frozen=True, slots=True)
class Message:
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    """None only at the beginning of a stream."""
    stop_sequence: str | None
    """The stop sequence that was found."""
    usage: Usage


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class MessageStart:
    """Opens a stream: the message without content. All tokens of the prompt count as computed so far."""

    type: Literal["message_start"]
    message: Message


@dataclass(frozen=True, slots=True)
class ContentBlockStart:
    """Opens a block, which is still empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text."""

    type: Literal["text_delta"]
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More thinking."""

    type: Literal["thinking_delta"]
    thinking: str


@dataclass(frozen=True, slots=True)
class SignatureDelta:
    """The last part of thinking; always empty."""

    type: Literal["signature_delta"]
    signature: Literal[""]


@dataclass(frozen=True, slots=True)
class InputJsonDelta:
    """More of a call's input: all of them joined are its JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


@dataclass(frozen=True, slots=True)
class ContentBlockDelta:
    """More of the open block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


@dataclass(frozen=True, slots=True)
class ContentBlockStop:
    """The block is over."""

    type: Literal["content_block_stop"]
    index: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The end of the message: its usage, which replaces that of the beginning."""

    type: Literal["message_delta"]
    delta: Stop
    usage: Usage


@dataclass(frozen=True, slots=True)
class MessageStop:
    """Nothing comes after it."""

    type: Literal["message_stop"]


@dataclass(frozen=True, slots=True)
class Ping:
    """Without meaning."""

    type: Literal["ping"]


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """What went wrong."""

    type: str
    message: str
    """Names the field at fault first."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Every error, as a response body or as a stream's last event."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


StreamEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | ErrorAnswer
)
