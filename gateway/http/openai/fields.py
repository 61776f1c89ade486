"""Common fields of chat completions and completions: sampling, form of the answer, and routing.

`null` means that a field is absent, as in OpenAI's API. Unsupported fields are refused by name.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from baton.errors import InvalidRequest
from baton.sampling import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from gateway.choices import MAX_CHOICES
from gateway.http.openai.structured import ResponseFormat, StructuredOutputs, structured_output_of
from gateway.routing.placement import Mode

MAX_TOKEN_ID = 2**31 - 1
MAX_NAME_CHARACTERS = 256

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
"""Fields with the same name and meaning as in SamplingParams."""


def _refuse(value: object) -> None:
    if value is not None:
        raise PydanticCustomError("not_supported", "this is not supported; remove it")


NotSupported = Annotated[None, BeforeValidator(_refuse), Field(description="Not supported; only `null`.")]


class Body(BaseModel):
    """Part of a request: unknown fields are errors, and a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """How a stream reports its usage."""

    include_usage: bool = Field(False, description="Add a last chunk with the usage and without choices.")
    continuous_usage_stats: bool = Field(
        False, description="vLLM's extension: with include_usage, every chunk has the usage so far."
    )
    include_obfuscation: Literal[False] | None = None


class GenerationFields(Body):
    """Common to both kinds of completions."""

    model: str = Field(description="A name from GET /v1/models.", max_length=MAX_NAME_CHARACTERS)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Number of independent answers.")
    stream: bool | None = Field(None, description="Server-sent events, one for each piece of the answer.")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="At most as many as the prompt leaves room for.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0, description="Default 1; 0 is greedy.")
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = Field(
        None, description="By token id, in quotes, since JSON's keys are strings."
    )
    user: str | None = Field(None, max_length=1024, description="Accepted and ignored.")

    # Extensions to OpenAI's API; names and meanings are vLLM's.
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="0 and -1 keep every token.")
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    min_tokens: int | None = Field(None, ge=0, description="At most max_tokens.")
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default true."
    )
    response_format: ResponseFormat | None = Field(None, description="Form of the answer.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Grammar that the answer must match."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Prompts share a prefix cache only with prompts of the same salt.",
    )
    skip_reading_prefix_cache: bool | None = Field(
        None, description="Compute the whole prompt; its blocks are still written to the prefix cache."
    )
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower values go first.")
    request_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._:\-]{1,128}$",
        description="Must differ from those of all running requests.",
    )
    # Baton's own extensions
    routing_mode: Literal["disaggregated", "local"] | None = Field(
        None, description="Prefill and decode on two workers, or everything on a decode worker."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Most tokens of prompt and answer together, at most the model's; the answer ends there.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Checks fields that are valid alone but not together; pydantic lets InvalidRequest pass through."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "needs stream: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs", "contradicts response_format; set only one")
        return self

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def keep_special_tokens(self) -> bool:
        return self.skip_special_tokens is False

    @property
    def mode(self) -> Mode | None:
        return None if self.routing_mode is None else Mode(self.routing_mode)

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """InvalidRequest names the field that contradicts another one."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed & MAX_SEED,
            logit_bias=self._biases(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            structured_output=structured_output_of(self.response_format, self.structured_outputs),
            **given,
        )

    def _biases(self) -> dict[int, float]:
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            if not re.fullmatch("0|[1-9][0-9]{0,9}", key):  # no two such keys are the same number
                raise InvalidRequest("logit_bias", f"keys must be token ids, got {key[:60]!r}")
            biases[int(key)] = bias
        return biases
