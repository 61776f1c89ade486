"""ResponseRequest and InputTokensRequest: the bodies of POST /v1/responses and /v1/responses/input_tokens."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from baton.sampling import MAX_LOGPROBS, GrammarKind, SamplingParams, StructuredOutput
from gateway.conversation import ReasoningOptions
from gateway.http.body import Body, NotSupported, Only, Whole
from gateway.http.openai.fields import Effort, reasoning_of
from gateway.http.responses.items import MAX_ID_CHARACTERS, InputItem, InputItems, MessageItem
from gateway.http.responses.tools import MAX_TOOLS, ResponseTool, ToolChoiceField
from gateway.http.sampling_fields import ModelName, PromptCacheKey, SamplingFields
from gateway.http.vllm_fields import VLLMFields
from gateway.preprocess import UNLIMITED

MAX_PAIRS = 16
LOGPROBS = "message.output_text.logprobs"

CLIENT_NAMES = {
    "prompt": "input",
    "chat": "input",
    "token_ids": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_output": "text.format",
    "reasoning": "reasoning.effort",
}
"""Maps names of fields in errors to this API's names."""


class PlainText(Body):
    """Any text, which is the default."""

    type: Literal["text"]


class JsonObjectText(Body):
    """The text must be a JSON object."""

    type: Literal["json_object"]


class JsonSchemaText(Body):
    """The text must be a JSON value that the schema admits."""

    type: Literal["json_schema"]
    name: str = Field(description="Accepted and repeated. Any text, such as `Page[Item]`.")
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, description="Accepted and repeated.")
    strict: bool | None = Field(None, description="Answers always match the schema.")


class TextOptions(Body):
    """The form of the text."""

    format: Annotated[PlainText | JsonObjectText | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: NotSupported = None

    def structured_output(self) -> StructuredOutput | None:
        match self.format:
            case JsonObjectText():
                source = json.dumps({"type": "object"})
            case JsonSchemaText(schema_=schema):
                source = json.dumps(schema)
            case _:
                return None
        try:
            return StructuredOutput(GrammarKind.JSON_SCHEMA, source)
        except InvalidRequest as error:
            raise InvalidRequest("text.format.schema", error.problem) from error


class ReasoningFields(Body):
    """How much the model thinks. A level has no effect if the model's chat template has no levels."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The reasoning itself is in `content`; there is no summary of it."
    )
    generate_summary: NotSupported = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Annotated[None, Only(False)] = None


class PromptFields(Body):
    """The fields of a prompt."""

    input: str | InputItems | None = Field(None, description="A user's text, or items.")
    instructions: str | None = Field(
        None, description="The first turn, of role `system`; previous_response_id does not carry it over."
    )
    previous_response_id: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_ID_CHARACTERS,
        description="A stored response that this one continues.",
    )
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto`: turns are left out, oldest first, until the prompt fits."
    )
    conversation: NotSupported = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.input is None and self.previous_response_id is None:
            raise InvalidRequest("input", "required, but missing")
        return self

    @property
    def items(self) -> list[InputItem]:
        """The items of the input. A text becomes a user's message."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or []

    @property
    def reasoning_options(self) -> ReasoningOptions:
        return reasoning_of(None if self.reasoning is None else self.reasoning.effort)


class InputTokensRequest(PromptFields):
    """The body of POST /v1/responses/input_tokens."""

    model: str | None = Field(None, max_length=MAX_ID_CHARACTERS)
    personality: NotSupported = None


class ResponseRequest(PromptFields, SamplingFields, VLLMFields):
    """OpenAI's fields work as OpenAI documents them, except as described here."""

    model: ModelName
    max_output_tokens: Whole[int | None] = Field(
        None,
        ge=1,
        description="Reasoning and calls included; by default all that the prompt leaves room for.",
    )
    max_tool_calls: Whole[int | None] = Field(
        None, ge=1, description="Accepted without effect: it limits hosted tools, and Baton has none."
    )
    top_logprobs: Whole[int | None] = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"Needs include: {LOGPROBS}."
    )
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=8)
        ]
        | None
    ) = Field(None, description="Reasoning is never encrypted: it is in `content` anyway.")
    store: bool | None = Field(None, description="Keep the response for a while; default true.")
    stream: bool | None = Field(None, description="Server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_PAIRS),
        ]
        | None
    ) = Field(None, description="Repeated in the response.")
    user: str | None = Field(None, max_length=1024, description="Repeated, otherwise ignored.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Repeated, otherwise ignored.")
    client_metadata: dict[str, Any] | None = Field(
        None, description="Accepted and ignored: Codex describes itself here."
    )
    service_tier: Literal["auto", "default"] | None = None
    background: Annotated[None, Only(False)] = None
    prompt_cache_key: PromptCacheKey | None = None

    access_programs: NotSupported = None
    background_options: NotSupported = None
    context_management: NotSupported = None
    image: NotSupported = None
    moderation: NotSupported = None
    prompt: NotSupported = None
    prompt_cache_options: NotSupported = None
    prompt_cache_retention: NotSupported = None

    # Only in vLLM's responses
    chat_template_kwargs: NotSupported = None
    enable_response_messages: Annotated[None, Only(False)] = None
    include_reasoning: Annotated[None, Only(True)] = None
    previous_input_messages: NotSupported = None
    request_id: NotSupported = None
    skip_special_tokens: Annotated[None, Only(True)] = None
    structured_outputs: NotSupported = None

    @model_validator(mode="after")
    def _check_response(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "needs stream: true")
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidRequest("top_logprobs", f'needs include: ["{LOGPROBS}"]')
        return self

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest for a field that contradicts another field."""
        logprobs = (self.top_logprobs or 0) if self.has_logprobs else None
        grammar = None if self.text is None else self.text.structured_output()
        return self.params_with(self.max_output_tokens or UNLIMITED, logprobs, grammar)
