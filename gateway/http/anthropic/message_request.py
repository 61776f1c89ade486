"""MessagesRequest and CountTokensRequest: the bodies of POST /v1/messages and /v1/messages/count_tokens."""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from baton.sampling import (
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    GrammarKind,
    SamplingParams,
    StructuredOutput,
)
from gateway.conversation import Conversation, ReasoningOptions
from gateway.http.anthropic.blocks import CacheControl, TextBlocks, Turn
from gateway.http.anthropic.conversation import messages_of
from gateway.http.anthropic.output import (
    ContextManagement,
    JsonFormat,
    OutputConfig,
    Thinking,
    reasoning_of,
)
from gateway.http.anthropic.tools import ChoiceBody, Tools, tool_choice_of, tools_of
from gateway.http.openai.fields import MAX_NAME_CHARACTERS, MAX_TOKEN_ID, Body, NotSupported, Penalty
from gateway.routing.placement import Mode

MAX_TURNS = 4096

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields with the same name and meaning as in SamplingParams."""


class CountTokensRequest(Body):
    """What a prompt is made of; common to both bodies."""

    model: str = Field(description="A name from GET /v1/models.", max_length=MAX_NAME_CHARACTERS)
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)]
    system: str | TextBlocks | None = None
    tools: Tools | None = None
    tool_choice: ChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="An earlier name of output_config.format.")
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[None], Field(max_length=0)] | None = Field(
        None, description="Not supported; only empty."
    )

    @property
    def conversation(self) -> Conversation:
        """InvalidRequest names the field that contradicts another one."""
        tools = tools_of(self.tools)
        choice = self.tool_choice
        return Conversation(
            messages_of(self.system, self.messages),
            tools,
            tool_choice_of(choice, tools),
            parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", None),
            reasoning=self.reasoning,
        )

    @property
    def reasoning(self) -> ReasoningOptions:
        effort = None if self.output_config is None else self.output_config.effort
        return reasoning_of(self.thinking, effort)


class Metadata(Body):
    """About the request."""

    user_id: str | None = Field(None, max_length=1024, description="Accepted and ignored.")


class MessagesRequest(CountTokensRequest):
    """Anthropic's fields work as Anthropic documents them, except as described here."""

    max_tokens: int = Field(ge=1, description="At most as many as the prompt leaves room for.")
    stream: bool | None = Field(None, description="Server-sent events, one for each piece of the answer.")
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Field(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    temperature: float | None = Field(None, ge=0.0, le=100.0, description="Default 1; 0 is greedy.")
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="0 and -1 keep every token.")
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: NotSupported = None
    diagnostics: NotSupported = None
    inference_geo: NotSupported = None

    # Extensions, as in chat completions.
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    skip_reading_prefix_cache: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower values go first.")
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:\-]{1,128}$")
    routing_mode: Literal["disaggregated", "local"] | None = None
    max_model_len: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = self.reasoning.max_tokens
        if budget is not None and budget >= self.max_tokens:
            raise InvalidRequest(
                "thinking.budget_tokens", f"must be less than max_tokens ({self.max_tokens}), got {budget}"
            )
        return self

    @property
    def mode(self) -> Mode | None:
        return None if self.routing_mode is None else Mode(self.routing_mode)

    def sampling(self) -> SamplingParams:
        """InvalidRequest names the field that contradicts another one."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=self.max_tokens,
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed & MAX_SEED,
            stop=tuple(self.stop_sequences or ()),
            structured_output=self._structured_output(),
            **given,
        )

    def _structured_output(self) -> StructuredOutput | None:
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is not None and self.output_format is not None:
            raise InvalidRequest("output_format", "is the earlier name of output_config.format; set only one")
        wanted = wanted or self.output_format
        return (
            None if wanted is None else StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(wanted.schema_))
        )
