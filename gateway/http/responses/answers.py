"""The shapes of the Responses API's answers; their description in /openapi.json is made from this module.

`output` and `response_json` write the JSON of answers in pieces. Tests compare that JSON with the classes
below.
"""

from dataclasses import dataclass
from typing import Any, Literal

from gateway.http.openai.answers import ContentLogprob, Optional
from gateway.http.responses.output import ItemStatus

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


@dataclass(frozen=True, slots=True)
class OutputTextAnswer:
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ContentLogprob]


@dataclass(frozen=True, slots=True)
class OutputMessageAnswer:
    """A message for the user."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextAnswer]


@dataclass(frozen=True, slots=True)
class ReasoningTextAnswer:
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningAnswer:
    """Reasoning before an answer or a call."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningTextAnswer]
    encrypted_content: None


@dataclass(frozen=True, slots=True)
class FunctionCallAnswer:
    """A call that the client should make."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: Optional[str] = None
    """The namespace of the function; absent if it is in none."""


@dataclass(frozen=True, slots=True)
class InputTokensDetails:
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Tokens found in a prefix cache."""
    cache_write_tokens: int
    """Always 0: Baton has no explicit cache breakpoints."""


@dataclass(frozen=True, slots=True)
class OutputTokensDetails:
    """Details of the answer's tokens."""

    reasoning_tokens: int
    """Tokens of the reasoning and of its tags."""


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@dataclass(frozen=True, slots=True)
class ResponseError:
    """Why a response failed."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class IncompleteDetails:
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The answer of POST /v1/responses, with the request's fields and their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessageAnswer | ReasoningAnswer | FunctionCallAnswer]
    usage: ResponseUsage | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["auto", "disabled"]
    store: bool
    background: Literal[False]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


@dataclass(frozen=True, slots=True)
class ResponseEvent:
    """One event of a stream. Its other fields depend on its type, as OpenAI documents them."""

    type: str
    sequence_number: int
    """The event's number: from 0, without gaps."""


@dataclass(frozen=True, slots=True)
class DeletedResponse:
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@dataclass(frozen=True, slots=True)
class InputTokensAnswer:
    """The answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class ItemList:
    """The answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
