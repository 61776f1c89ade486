"""The shapes of Anthropic's answers and events; their description in /openapi.json is made from this module.

`whole` and `events` write the JSON of answers in pieces. Tests compare that JSON with the classes below.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


@dataclass(frozen=True, slots=True)
class MessageTokensDetails:
    """Details of the answer's tokens."""

    thinking_tokens: int
    """Tokens of thinking and of its tags. They count even if the client does not get the thinking."""


@dataclass(frozen=True, slots=True)
class MessageUsage:
    """The tokens of an answer. Each prompt token counts in `input_tokens` or in `cache_read_input_tokens`, never in
    both."""

    input_tokens: int
    """Prompt tokens that were computed for this answer."""
    cache_creation_input_tokens: Literal[0]
    """Always 0: every computed prompt token is written to the prefix cache, so written tokens are not counted
    separately."""
    cache_read_input_tokens: int
    """Prompt tokens that were found in a prefix cache."""
    output_tokens: int
    output_tokens_details: MessageTokensDetails
    service_tier: Literal["standard"] = "standard"


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """The text for the user."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingAnswer:
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]
    """Always empty: Baton signs nothing."""


@dataclass(frozen=True, slots=True)
class ToolUseAnswer:
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


@dataclass(frozen=True, slots=True)
class Message:
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    """Why the answer ended. None only at the beginning of a stream."""
    stop_sequence: str | None
    """The stop sequence that was found."""
    usage: MessageUsage


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class MessageStart:
    """Opens a stream: the message without content. Its usage counts all prompt tokens as computed; MessageDelta has
    the numbers of computed and cached tokens."""

    type: Literal["message_start"]
    message: Message


@dataclass(frozen=True, slots=True)
class ContentBlockStart:
    """Opens a block. The block is still empty."""

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
    """More of a call's input. All such parts together are the JSON of the input."""

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
class MessageEnd:
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The end of the message. Its usage replaces the usage of MessageStart."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


@dataclass(frozen=True, slots=True)
class MessageStop:
    """The last event of a stream."""

    type: Literal["message_stop"]


@dataclass(frozen=True, slots=True)
class Ping:
    """An event without meaning."""

    type: Literal["ping"]


@dataclass(frozen=True, slots=True)
class ThreadsUnsupported:
    """The request has the field `thread`. The same request without this field can be served."""

    error_code: Literal["thread_unsupported_request"]


@dataclass(frozen=True, slots=True)
class MessageErrorDetail:
    """What went wrong."""

    type: str
    message: str
    """Begins with the name of the field that caused the error."""
    details: Annotated[ThreadsUnsupported | None, Field(exclude_if=lambda value: value is None)] = None


@dataclass(frozen=True, slots=True)
class MessageErrorAnswer:
    """The shape of every error: a response body, or a stream's last event."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


StreamEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessageErrorAnswer
)
