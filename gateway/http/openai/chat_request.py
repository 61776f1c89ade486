"""ChatCompletionRequest: the body of POST /v1/chat/completions."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.errors import InvalidRequest
from baton.sampling import MAX_LOGPROBS, SamplingParams
from gateway.conversation import ChatMessage, Conversation
from gateway.http.body import Body, NotSupported
from gateway.http.openai.fields import GenerationFields
from gateway.preprocess import UNLIMITED

MAX_MESSAGES = 4096
MAX_PARTS = 1024


class TextPart(Body):
    """A piece of a message's text. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of the conversation so far.

    An assistant's message may be sent back unchanged, with its empty fields.
    """

    role: Literal["developer", "system", "user", "assistant"] = Field(
        description="The model's template receives `developer`, OpenAI's newer name, as `system`."
    )
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    name: NotSupported = None
    refusal: NotSupported = None
    annotations: NotSupported = None
    audio: NotSupported = None
    function_call: NotSupported = None
    tool_calls: NotSupported = None
    tool_call_id: NotSupported = None

    def as_chat_message(self) -> ChatMessage:
        """Text parts are joined without separators."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return ChatMessage("system" if self.role == "developer" else self.role, text)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
"""Only one problem is reported, so checking stops there: a body may have very many."""


class ChatCompletionRequest(GenerationFields):
    """OpenAI's fields work as OpenAI documents them, except as described here."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="OpenAI's newer name for max_tokens. Default: all that the prompt leaves room for.",
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs: true.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted and ignored.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    audio: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    metadata: NotSupported = None
    moderation: NotSupported = None
    parallel_tool_calls: NotSupported = None
    prediction: NotSupported = None
    prompt_cache_key: NotSupported = None
    prompt_cache_options: NotSupported = None
    prompt_cache_retention: NotSupported = None
    reasoning_effort: NotSupported = None
    tool_choice: NotSupported = None
    tools: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) == 2:
            raise InvalidRequest(
                "max_tokens",
                f"{self.max_tokens} contradicts max_completion_tokens ({self.max_completion_tokens}); set "
                "only one",
            )
        return self

    @property
    def chat(self) -> Conversation:
        return Conversation(tuple(message.as_chat_message() for message in self.messages))

    def sampling(self) -> SamplingParams:
        """InvalidRequest names the field that contradicts another one."""
        max_tokens = self.max_completion_tokens or self.max_tokens or UNLIMITED
        return self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)
