"""CompletionRequest: the body of POST /v1/completions."""

from typing import Annotated, Self

from pydantic import Discriminator, Field, Tag, model_validator

from baton.errors import InvalidRequest
from baton.sampling import MAX_LOGPROBS, SamplingParams
from gateway.choices import MAX_CHOICES
from gateway.http.body import NotSupported, Only, TokenId, Whole
from gateway.http.openai.fields import GenerationFields

DEFAULT_MAX_TOKENS = 16
"""The default of `max_tokens`, as in OpenAI's API."""

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
ManyTokenIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


def _kind(prompt: object) -> str:
    """The kind of a prompt. Its first element decides, so that errors are about the kind that the client
    meant."""
    if not isinstance(prompt, list):
        return "text"
    match prompt[:1]:
        case [int()]:
            return "token_ids"
        case [list()]:
            return "many_token_ids"
        case _:
            return "texts"


AnyPrompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[ManyTokenIds, Tag("many_token_ids")],
    Discriminator(_kind),
]


class CompletionRequest(GenerationFields):
    """OpenAI's fields work as OpenAI documents them, except as described here."""

    prompt: AnyPrompt = Field(
        description="A text, or a list of token ids; or a list of such prompts. Each prompt gets n answers, in order."
    )
    max_tokens: Whole[int | None] = Field(
        None,
        ge=0,
        description=f"Default {DEFAULT_MAX_TOKENS}; at most what the prompt leaves room for. 0 only with echo.",
    )
    logprobs: Whole[int | None] = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(
        None, description="Repeat the prompt before the answer. logprobs then begin with the prompt's tokens."
    )
    suffix: NotSupported = None

    # Only in vLLM's completions
    add_special_tokens: Annotated[None, Only(True)] = None
    prompt_embeds: NotSupported = None
    thinking_token_budget: NotSupported = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.is_only_echo and not self.echo:
            raise InvalidRequest("max_tokens", "must be greater than or equal to 1 without echo, got 0")
        if self.is_only_echo and self.min_tokens:
            raise InvalidRequest("min_tokens", f"must be 0 with max_tokens 0, got {self.min_tokens}")
        if self.echo and len({self.logprobs, self.prompt_logprobs} - {None}) == 2:
            raise InvalidRequest(
                "prompt_logprobs",
                f"{self.prompt_logprobs} contradicts logprobs ({self.logprobs}) with echo; set only one",
            )
        if len(self.prompts) * self.num_samples > MAX_CHOICES:
            raise InvalidRequest(
                "n",
                f"{len(self.prompts)} prompts with {self.num_samples} answers each exceed the limit of "
                f"{MAX_CHOICES}; send several requests",
            )
        return self

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts. A flat list of token ids is one prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if token_ids := tuple(part for part in prompt if isinstance(part, int)):
            return [token_ids]
        return [
            part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int)
        ]

    @property
    def is_only_echo(self) -> bool:
        """Whether the answer is only the prompt. Every request computes a token; in this case, it is not shown."""
        return self.max_tokens == 0

    @property
    def client_names(self) -> dict[str, str]:
        is_echo = self.echo and self.prompt_logprobs is None
        return super().client_names | ({"prompt_logprobs": "logprobs"} if is_echo else {})

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest for a field that contradicts another field."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        logprobs = None if self.is_only_echo else self.logprobs
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = self.logprobs
        return self.sampling_params(max_tokens, logprobs, prompt_logprobs)
