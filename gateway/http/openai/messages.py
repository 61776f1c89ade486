"""Messages of a chat: converts OpenAI's roles and fields to Baton's types."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from baton.errors import InvalidRequest
from gateway.conversation import ChatMessage, ToolCall
from gateway.conversation.checks import MAX_CALLS, MAX_MESSAGES, with_tools_named
from gateway.http.body import PARSED, Body, NotSupported, Whole

T = TypeVar("T")

MAX_PARTS = 1024
MAX_CALL_ID_CHARACTERS = 512
MAX_CALL_NAME_CHARACTERS = 256
"""Longest name in a call that the model made. This name may differ from all names of tools."""


class Cacheable(Body):
    """A part of a request that clients of several providers may mark for Anthropic's prefix cache."""

    cache_control: Any = Field(
        None, description="Accepted and ignored: all prefixes are cached while there is room."
    )


class TextPart(Cacheable):
    """A piece of a message's text. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str


NoRefusal = Annotated[
    NotSupported,
    BeforeValidator(lambda value: None if value == "" else value),
    Field(description="Not supported; only `null` and an empty text."),
]


class AnswerTextPart(TextPart):
    """A piece of an answer's text. OpenAI's Agents SDK for JavaScript copies the answer's other fields into it. These
    fields are accepted and ignored."""

    role: Literal["assistant"] | None = None
    refusal: NoRefusal = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


Parts = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
"""Parts that are joined without separators. LangChain and Zed send an empty list if a tool returns nothing."""
Content = str | Parts[TextPart]


Name = Annotated[
    str,
    Field(
        max_length=MAX_CALL_NAME_CHARACTERS, description="The model sees it if its chat template reads it."
    ),
]
"""Who wrote a message, for conversations of several users or agents."""

CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARACTERS)]

TypeOfText = Annotated[
    Literal["text"] | None,
    Field(description="Accepted and ignored: lm-evaluation-harness before 0.4.12 sends it."),
]


class InputMessage(Cacheable):
    """A message to the model."""

    role: Literal["developer", "system", "user"] = Field(
        description="The model's template receives `developer`, OpenAI's newer name, as `system`."
    )
    content: Content
    name: Name | None = None
    type: TypeOfText = None

    def as_chat_message(self) -> ChatMessage:
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, _text_of(self.content), name=self.name or None)


class CalledFunction(Body):
    """The function of a call, and what the model wrote for it."""

    name: str = Field(min_length=1, max_length=MAX_CALL_NAME_CHARACTERS)
    arguments: str | None = Field(
        None, description="JSON, as the model wrote it. Absent: go-openai leaves out empty arguments."
    )
    parsed_arguments: Any = Field(None, description=PARSED)


class Call(Body):
    """A call that the model made."""

    id: CallId
    type: Literal["function"] | None = None
    function: CalledFunction
    index: Whole[int | None] = Field(
        None, ge=0, description="Accepted and ignored: pieces of streams have it."
    )

    def as_tool_call(self) -> ToolCall:
        arguments = self.function.arguments
        return ToolCall(self.id, self.function.name, "{}" if arguments is None else arguments)


class ThoughtBlock(Body):
    """A thought in the form of Anthropic's API, to which LiteLLM and others convert reasoning."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: Any = Field(None, description="Accepted and ignored.")
    data: Any = Field(None, description="Accepted and ignored.")


class AssistantMessage(Cacheable):
    """An answer of the model. It may be sent back unchanged, with its empty fields."""

    role: Literal["assistant"]
    content: str | Parts[AnswerTextPart] | None = Field(
        None, description="Absent or null: no text. go-openai leaves out an empty text."
    )
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    reasoning_content: str | None = Field(
        None,
        description="What the model thought before it answered. It sees this again if its chat template reads it.",
    )
    reasoning: str | None = Field(None, description="vLLM's newer name for reasoning_content.")
    thinking_blocks: Annotated[list[ThoughtBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = (
        Field(None, description="LiteLLM's form of reasoning_content, which counts if both are given.")
    )
    name: Name | None = None
    type: TypeOfText = None
    refusal: NoRefusal = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Must be empty; OpenAI's answers have this field."
    )
    audio: NotSupported = None
    function_call: NotSupported = None
    parsed: Any = Field(None, description=PARSED)
    provider_specific_fields: Any = Field(
        None, description="Accepted and ignored: LiteLLM adds it to an answer with reasoning."
    )

    def as_chat_message(self) -> ChatMessage:
        calls = [call.as_tool_call() for call in self.tool_calls or ()]
        in_blocks = "".join(block.thinking or "" for block in self.thinking_blocks or ())
        reasoning = self.reasoning_content or self.reasoning or in_blocks or None
        return ChatMessage(
            "assistant", _text_of(self.content), reasoning, tuple(calls), name=self.name or None
        )


class ToolMessage(Cacheable):
    """The result of a call."""

    role: Literal["tool"]
    content: Content | None = Field(None, description="As in an assistant's message.")
    tool_call_id: CallId | None = Field(None, description="Required, unless `id` has this value.")
    id: CallId | None = Field(None, description="Qwen-Agent's name for tool_call_id.")
    name: str | None = Field(None, max_length=MAX_CALL_NAME_CHARACTERS, description="The called function.")
    type: TypeOfText = None
    extra: Any = Field(None, description="Accepted and ignored: Qwen-Agent repeats the call's id here.")

    def as_chat_message(self) -> ChatMessage:
        call_id = self.tool_call_id or self.id
        return ChatMessage("tool", _text_of(self.content), tool_call_id=call_id, name=self.name)


Message = Annotated[InputMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
"""The check stops at the first problem: a body may have very many problems, and only one problem is reported."""


def chat_messages_of(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Converts the messages to Baton's type. Each tool's result gets the name of the tool that was called.

    Raises InvalidRequest if a message contradicts itself or an earlier message; the error names the message's
    field.
    """
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            _check_answer(message, f"messages.{index}")
        elif isinstance(message, ToolMessage):
            _check_result(message, f"messages.{index}")
    converted = [message.as_chat_message() for message in messages]
    return with_tools_named(converted, "messages", "function.arguments")


def _check_answer(message: AssistantMessage, path: str) -> None:
    both = {message.reasoning, message.reasoning_content} - {None, ""}
    if len(both) == 2:
        raise InvalidRequest(f"{path}.reasoning", "differs from reasoning_content; send one of them")


def _check_result(message: ToolMessage, path: str) -> None:
    ids = {message.tool_call_id, message.id} - {None}
    if not ids:
        raise InvalidRequest(f"{path}.tool_call_id", "required, but missing")
    if len(ids) == 2:
        raise InvalidRequest(f"{path}.id", "differs from tool_call_id; send one of them")


def _text_of(content: str | Sequence[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
