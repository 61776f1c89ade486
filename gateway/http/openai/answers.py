"""The shapes of OpenAI's answers, whole and in chunks; /openapi.json describes them from here.

`whole` and `events` write the JSON of completions in pieces; tests compare it with these shapes.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]

MIN_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, since JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """Details of the prompts' tokens."""

    cached_tokens: int
    """Tokens found in a prefix cache."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer. A prompt counts once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability under the model, before any sampling setting."""

    token: str
    logprob: float
    bytes: list[int]
    """Bytes of the text. A character may be spread over several tokens, whose `token` is then only a placeholder."""


@dataclass(frozen=True, slots=True)
class ContentLogprob:
    """The token at one position, and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class ChatLogprobs:
    """One entry for each token."""

    content: list[ContentLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """Parallel lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where the token begins in the choice's text, in characters."""


@dataclass(frozen=True, slots=True)
class ChatMessageAnswer:
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of n answers."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One of n answers to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


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
class ChatDelta:
    """The new part. The first one has the role."""

    content: str
    role: Literal["assistant"] | None = None


@dataclass(frozen=True, slots=True)
class ChatChunkChoice:
    """The new part of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class ChatCompletionChunk:
    """One event of a stream; the last one before [DONE] has the usage and no choice, if it was asked for."""

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
    """The field at fault."""
    code: str


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Every error, as a response body or as a stream's last event."""

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
    """Tokens of prompt and answer together."""


@dataclass(frozen=True, slots=True)
class ModelList:
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
