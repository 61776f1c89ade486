"""The fields that chat completions and completions have in common: sampling, form of the answer, and routing.

`null` means that a field is absent, as in OpenAI's API. Unsupported fields are refused by name.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from baton.sampling import MAX_LOGPROBS, SamplingParams
from gateway.choices import MAX_CHOICES
from gateway.conversation import ReasoningOptions
from gateway.http.body import Body, Only, Whole
from gateway.http.openai.structured import (
    OldGuided,
    ResponseFormat,
    StructuredOutputs,
    structured_output_of,
)
from gateway.http.sampling_fields import ModelName, PromptCacheKey, RequestId, SamplingFields
from gateway.http.vllm_fields import VLLMGenerationFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def reasoning_of(effort: Effort | None, max_tokens: int | None = None) -> ReasoningOptions:
    if effort == "none":
        return ReasoningOptions(is_enabled=False, max_tokens=max_tokens)
    return ReasoningOptions(max_tokens=max_tokens, effort=effort)


class StreamOptions(Body):
    """How a stream reports its usage."""

    include_usage: bool | None = Field(
        None, description="Add a last chunk with the usage and without choices; default false."
    )
    continuous_usage_stats: bool | None = Field(
        None,
        description="vLLM's extension: with include_usage, every chunk has the usage so far; default false.",
    )
    include_obfuscation: Annotated[None, Only(False)] = None


class GenerationFields(SamplingFields, VLLMGenerationFields):
    """The fields that both kinds of completions have."""

    prompt_cache_key: PromptCacheKey | None = None
    model: ModelName
    n: Whole[int | None] = Field(None, ge=1, le=MAX_CHOICES, description="Number of independent answers.")
    best_of: Whole[int | None] = Field(None, ge=1, description="Must equal n: all answers are returned.")
    stream: bool | None = Field(None, description="Server-sent events, one for each piece of the answer.")
    stream_options: StreamOptions | None = None
    max_tokens: Whole[int | None] = Field(
        None, ge=1, description="At most as many as the prompt leaves room for."
    )
    user: str | None = Field(None, max_length=1024, description="Accepted and ignored.")

    # Extensions to OpenAI's API; names and meanings are vLLM's.
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default true."
    )
    response_format: ResponseFormat | None = Field(None, description="Form of the answer.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Grammar that the answer must match."
    )
    prompt_logprobs: Whole[int | None] = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="How many of the most likely tokens to report with each token of the prompt. Not with stream.",
    )
    request_id: RequestId = None

    guided_json: OldGuided = None
    guided_regex: OldGuided = None
    guided_choice: OldGuided = None
    guided_grammar: OldGuided = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuses fields that are valid alone but not together. Raises InvalidRequest, which pydantic does not
        catch."""
        if self.best_of is not None and self.best_of != self.num_samples:
            raise InvalidRequest(
                "best_of", f"must equal n ({self.num_samples}), got {self.best_of}; set only n"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", "not with stream: true; drop one of them")
        if (
            self.stream_options is not None
            and self.stream_options.continuous_usage_stats
            and not self.says_usage
        ):
            raise InvalidRequest("stream_options.continuous_usage_stats", "needs include_usage: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs", "contradicts response_format; set only one")
        return self

    @property
    def client_names(self) -> dict[str, str]:
        """Maps names of fields in errors to this API's names."""
        grammar = "response_format" if self.structured_outputs is None else "structured_outputs"
        return {"structured_output": grammar, "token_ids": "prompt"}

    @property
    def says_usage(self) -> bool:
        """Whether the answer contains its usage."""
        options = self.stream_options
        return not self.stream or (options is not None and bool(options.include_usage))

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def keep_special_tokens(self) -> bool:
        return self.skip_special_tokens is False

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest for a field that contradicts another field."""
        grammar = structured_output_of(self.response_format, self.structured_outputs)
        return self.params_with(max_tokens, logprobs, grammar, prompt_logprobs)
