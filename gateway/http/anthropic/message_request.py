"""MessagesRequest and CountTokensRequest: the bodies of POST /v1/messages and /v1/messages/count_tokens."""

import json
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from baton.sampling import MAX_STOP_STRINGS, GrammarKind, SamplingParams, StructuredOutput
from gateway.conversation import Conversation, ReasoningOptions
from gateway.conversation.checks import MAX_MESSAGES
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
from gateway.http.body import Body, NotSupported, Whole
from gateway.http.sampling_fields import ModelName, RequestId, SamplingFields, Stop


class CountTokensRequest(Body):
    """The fields of a prompt, which both bodies have."""

    model: ModelName
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
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
        """The conversation to continue. Raises InvalidRequest for a field that contradicts another field."""
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
    def client_names(self) -> dict[str, str]:
        """Maps names of fields in errors to this API's names."""
        return {
            "prompt": "messages",
            "chat": "messages",
            "token_ids": "messages",
            "reasoning": "thinking",
            "stop": "stop_sequences",
            "structured_output": "output_format" if self.output_format else "output_config.format",
        }

    @property
    def reasoning(self) -> ReasoningOptions:
        effort = None if self.output_config is None else self.output_config.effort
        return reasoning_of(self.thinking, effort)


class Metadata(Body):
    """Information about the request."""

    user_id: str | None = Field(None, max_length=1024, description="Accepted and ignored.")


class MessagesRequest(CountTokensRequest, SamplingFields):
    """Anthropic's fields work as Anthropic documents them, except as described here. Other fields are
    extensions; they have the same names as in chat completions."""

    max_tokens: Whole[int] = Field(ge=1, description="At most as many as the prompt leaves room for.")
    stream: bool | None = Field(None, description="Server-sent events, one for each piece of the answer.")
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    request_id: RequestId = None
    container: NotSupported = None
    diagnostics: NotSupported = None
    inference_geo: NotSupported = None
    stop: NotSupported = Field(None, description="Not supported; use stop_sequences.")
    thread: NotSupported = Field(None, description="Not supported; send the whole conversation.")

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = self.reasoning.max_tokens
        if budget is not None and budget >= self.max_tokens:
            raise InvalidRequest(
                "thinking.budget_tokens", f"must be less than max_tokens ({self.max_tokens}), got {budget}"
            )
        return self

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest for a field that contradicts another field."""
        params = self.params_with(self.max_tokens, None, self._structured_output())
        return replace(params, stop=tuple(self.stop_sequences or ()))

    def _structured_output(self) -> StructuredOutput | None:
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is not None and self.output_format is not None:
            raise InvalidRequest("output_format", "is the earlier name of output_config.format; set only one")
        wanted = wanted or self.output_format
        return (
            None if wanted is None else StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(wanted.schema_))
        )
