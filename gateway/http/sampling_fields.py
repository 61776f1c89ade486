"""SamplingFields: fields of several APIs that say how to sample tokens, when to stop, and where to run."""

import re
from typing import Annotated, Literal

from pydantic import Field

from baton.errors import InvalidRequest
from baton.sampling import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    MODEL_DEFAULTS,
    SamplingParams,
    StructuredOutput,
)
from gateway.http.body import MAX_TOKEN_ID, Body, TokenId, Whole
from gateway.routing.placement import Mode

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
"""Fields that have the same name and meaning in SamplingParams."""

ModelName = Annotated[str, Field(max_length=256, description="A name from GET /v1/models.")]
RequestId = Annotated[
    str | None,
    Field(
        pattern=r"^[A-Za-z0-9._:\-]{1,128}$",
        description="Must differ from those of all running requests.",
    ),
]
PromptCacheKey = Annotated[
    str,
    Field(
        max_length=1024,
        description="Requests with the same key prefer the same workers. Useful if they have a common prefix.",
    ),
]


class SamplingFields(Body):
    """Fields with OpenAI's names and meanings, then fields with vLLM's, then Baton's own."""

    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = Field(
        None, ge=0.0, le=100.0, description="Default: the model's, else 1; 0 is greedy."
    )
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Whole[int | None] = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = Field(
        None, description="By token id, in quotes, since JSON's keys are strings."
    )

    # Extensions to OpenAI's API; names and meanings are vLLM's.
    top_k: Whole[int | None] = Field(None, ge=-1, le=MAX_TOKEN_ID, description="0 and -1 keep every token.")
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=100.0)
    min_tokens: Whole[int | None] = Field(None, ge=0, description="At most max_tokens.")
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Prompts share a prefix cache only with prompts of the same salt.",
    )
    skip_reading_prefix_cache: bool | None = Field(
        None, description="Compute the whole prompt; its blocks are still written to the prefix cache."
    )
    priority: Whole[int | None] = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower values go first.")
    # Baton's own extensions
    routing_mode: Literal["disaggregated", "local"] | None = Field(
        None, description="Prefill and decode on two workers, or everything on a decode worker."
    )
    max_model_len: Whole[int | None] = Field(
        None,
        ge=1,
        description="The answer ends when prompt and answer together have this many tokens; at most the model's limit.",
    )

    @property
    def mode(self) -> Mode | None:
        return None if self.routing_mode is None else Mode(self.routing_mode)

    @property
    def unset(self) -> list[str]:
        """The settings that the model's defaults replace."""
        return [name for name in MODEL_DEFAULTS if getattr(self, name) is None]

    def params_with(
        self,
        max_tokens: int,
        logprobs: int | None,
        structured_output: StructuredOutput | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest for a field that contradicts another field."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed & MAX_SEED,
            logit_bias=self._biases(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            structured_output=structured_output,
            **given,
        )

    def _biases(self) -> dict[int, float]:
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            if not re.fullmatch("0|[1-9][0-9]{0,9}", key):  # such keys differ only if their numbers differ
                raise InvalidRequest("logit_bias", f"keys must be token ids, got {key[:60]!r}")
            biases[int(key)] = bias
        return biases
