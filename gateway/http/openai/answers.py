"""The shapes of OpenAI's answers, whole and in chunks; their description in /openapi.json is made from this module.

`openai_answer`, `chat` and `completions` write the JSON of answers in pieces. Tests compare that JSON with the classes
below.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import Field

T = TypeVar("T")

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


def _is_absent(value: object) -> bool:
    return value is None


Optional = Annotated[T | None, Field(exclude_if=_is_absent)]
"""A key that is left out of the JSON if its value is None."""

MIN_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """Details of the prompts' tokens."""

    cached_tokens: int
    """Tokens found in a prefix cache."""


@dataclass(frozen=True, slots=True)
class CompletionTokensDetails:
    """Details of the answers' tokens."""

    reasoning_tokens: int
    """Tokens of reasoning and of its tags. They count even if the client does not get the reasoning."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer. A prompt counts once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Optional[CompletionTokensDetails] = None
    """Only chat completions have this field."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability under the model, before any sampling setting."""

    token: str
    logprob: float
    bytes: list[int]
    """Bytes of the text. If a character consists of several tokens, the `token` of each is only a
    placeholder."""


@dataclass(frozen=True, slots=True)
class ContentLogprob:
    """The sampled token of one position, and the most likely tokens of this position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class ChatLogprobs:
    """One entry for each token; without the reasoning (`include_reasoning: false`), only for tokens of the text."""

    content: list[ContentLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """Parallel lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which nothing precedes."""
    top_logprobs: list[dict[str, float] | None]
    """For each token: the token itself and the most likely tokens, by name."""
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The log-probability of a token at one position of a prompt; vLLM's extension."""

    logprob: float
    rank: int
    """The token's rank; 1 for the most likely token."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each token of the prompt; null for the first token. The keys of an entry are token ids: the prompt's
own token, then the most likely ones."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """The function that the model wants to call."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ToolCallAnswer:
    """A call that the client should make."""

    id: str
    """The message with the call's result (role `tool`) must contain this id."""
    type: Literal["function"]
    function: FunctionCall


@dataclass(frozen=True, slots=True)
class ChatMessageAnswer:
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """Null if the message has calls and no text."""
    refusal: None = None
    reasoning_content: Optional[str] = None
    reasoning: Optional[str] = None
    """The same text as `reasoning_content`, under vLLM's newer name."""
    tool_calls: Optional[list[ToolCallAnswer]] = None


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of n answers."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the answer. Null after any other end. A field of
    vLLM."""


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: Optional[PromptLogprobs] = None
    """Present if the request has this field."""


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One of n answers to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """See ChatChoice."""
    prompt_logprobs: Optional[PromptLogprobs] = None
    """Present if the request has this field."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@dataclass(frozen=True, slots=True)
class FunctionDelta:
    """A call's name, or more of its arguments."""

    arguments: str
    name: Optional[str] = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A new part of a call. The first part of each call has its id, type and name."""

    index: int
    """The number of the call in this answer, from 0."""
    function: FunctionDelta
    id: Optional[str] = None
    type: Optional[Literal["function"]] = None


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The new part of a message. The first part has the role."""

    content: str | None = None
    role: Optional[Literal["assistant"]] = None
    reasoning_content: Optional[str] = None
    reasoning: Optional[str] = None
    tool_calls: Optional[list[ToolCallDelta]] = None


@dataclass(frozen=True, slots=True)
class ChatChunkChoice:
    """The new part of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: Optional[str | int | None] = None
    """In the last event of the choice; see ChatChoice."""


@dataclass(frozen=True, slots=True)
class ChatCompletionChunk:
    """One event of a stream. If the client asked for usage, the last event before [DONE] has the usage, and no
    choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class CompletionChunkChoice:
    """The new part of one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: Optional[str | int | None] = None
    """In the last event of the choice; see ChatChoice."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """One event of a stream, like ChatCompletionChunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that caused the error."""
    code: str


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The shape of every error: a response body, or a stream's last event."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    """When this gateway began to serve it, in seconds since 1970."""
    owned_by: str
    max_model_len: int
    """Prompt and answer have at most this many tokens together."""
    root: str
    """vLLM's extension: the model's folder or file. Callers that may not administer get the model's name."""


@dataclass(frozen=True, slots=True)
class ModelList:
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
