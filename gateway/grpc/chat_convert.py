"""Protobuf <-> conversations and events: the gateway reads a Chat and writes events; its client writes a Chat and reads
events."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from baton.errors import InvalidRequest
from baton.v1 import generation_service_pb2 as pb
from gateway.call_ids import CallIds
from gateway.conversation import (
    NO_ARGUMENTS,
    AnswerEvent,
    ArgumentsDelta,
    CallBegins,
    CallEnds,
    ChatMessage,
    Conversation,
    Reasoning,
    ReasoningOptions,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
)
from gateway.conversation.call_syntax import is_tool_name
from gateway.conversation.checks import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_SCHEMA_CHARACTERS,
    MAX_TOOLS,
    check_among,
    check_tools,
    with_tools_named,
)
from gateway.conversation.template import MAX_OPTIONS, check_template_options
from gateway.strict_json import NotStrict, parse

USES_TO_PB = {
    ToolUse.NONE: pb.TOOL_USE_NONE,
    ToolUse.AUTO: pb.TOOL_USE_AUTO,
    ToolUse.REQUIRED: pb.TOOL_USE_REQUIRED,
}
USES_FROM_PB = {theirs: ours for ours, theirs in USES_TO_PB.items()} | {pb.TOOL_USE_UNSPECIFIED: ToolUse.AUTO}
CLIENT_NAMES: Mapping[str, str] = {
    "tools": "chat.tools",
    "tool_choice": "chat.tool_choice",
    "reasoning": "chat.reasoning",
    "template_options": "chat.template_options",
}
"""Maps names of fields in errors to this API's names, if the two names differ."""


def conversation_from(chat: pb.Chat) -> Conversation:
    """Converts a Chat; InvalidRequest names the field by its path in the request."""
    for name, entries, limit in (
        ("chat.tools", chat.tools, MAX_TOOLS),
        ("chat.tool_choice.names", chat.tool_choice.names, MAX_TOOLS),
        ("chat.template_options", chat.template_options, MAX_OPTIONS),
    ):
        if len(entries) > limit:
            raise InvalidRequest(name, f"must have at most {limit} entries, got {len(entries)}")
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidRequest(
            "chat", f"a conversation must have 1 to {MAX_MESSAGES} messages, got {len(chat.messages)}"
        )
    turns = [_turn_from(turn, f"chat.messages.{index}") for index, turn in enumerate(chat.messages)]
    tools = _tools_from(chat.tools)
    return Conversation(
        with_tools_named(turns, "chat.messages", "arguments"),
        tools,
        _tool_choice_from(chat.tool_choice, tools),
        chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        _reasoning_from(chat.reasoning),
        _template_options_from(chat.template_options),
    )


def wants_events(request: pb.GenerateRequest) -> bool:
    return request.HasField("chat") and (request.chat.events or bool(request.chat.tools))


def event_to_message(call_ids: CallIds, event: AnswerEvent) -> pb.AnswerEvent:
    """Converts an event. `call_ids`: the ids of the calls of the event's answer."""
    match event:
        case Text(text):
            return pb.AnswerEvent(text=text)
        case Reasoning(text):
            return pb.AnswerEvent(reasoning=text)
        case CallBegins(index, name):
            begins = pb.CallBegins(index=index, id=call_ids.of(index), name=name)
            return pb.AnswerEvent(call_begins=begins)
        case ArgumentsDelta(index, arguments):
            return pb.AnswerEvent(arguments_delta=pb.ArgumentsDelta(index=index, json=arguments))
        case CallEnds(index):
            return pb.AnswerEvent(call_ends=pb.CallEnds(index=index))


def conversation_to_message(conversation: Conversation) -> pb.Chat:
    """Converts a conversation, and sets `events`, so that the answer also contains events."""
    return pb.Chat(
        messages=map(_turn_to_message, conversation.messages),
        tools=map(_tool_to_message, conversation.tools),
        tool_choice=_tool_choice_to_message(conversation.tool_choice),
        parallel_tool_calls=conversation.parallel_tool_calls,
        reasoning=_reasoning_to_message(conversation.reasoning),
        template_options={key: json.dumps(value) for key, value in conversation.template_options.items()},
        events=True,
    )


def event_from(message: pb.AnswerEvent) -> AnswerEvent | None:
    """Converts an event. None: this release does not know its kind."""
    match message.WhichOneof("event"):
        case "text":
            return Text(message.text)
        case "reasoning":
            return Reasoning(message.reasoning)
        case "call_begins":
            return CallBegins(message.call_begins.index, message.call_begins.name)
        case "arguments_delta":
            return ArgumentsDelta(message.arguments_delta.index, message.arguments_delta.json)
        case "call_ends":
            return CallEnds(message.call_ends.index)
        case _:
            return None


def _turn_from(turn: pb.Chat.Message, path: str) -> ChatMessage:
    """Converts one message of a chat. Raises InvalidRequest for a field that belongs to another role."""
    for name, role in (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool")):
        if getattr(turn, name) and turn.role != role:
            raise InvalidRequest(f"{path}.{name}", f"only messages of role {role!r} have it")
    if turn.role == "tool" and not turn.tool_call_id:
        raise InvalidRequest(f"{path}.tool_call_id", "required for role 'tool'")
    if len(turn.tool_calls) > MAX_CALLS:
        raise InvalidRequest(
            f"{path}.tool_calls", f"must have at most {MAX_CALLS} entries, got {len(turn.tool_calls)}"
        )
    calls = []
    for index, call in enumerate(turn.tool_calls):
        if missing := next((name for name in ("id", "name") if not getattr(call, name)), None):
            raise InvalidRequest(f"{path}.tool_calls.{index}.{missing}", "must not be empty")
        calls.append(ToolCall(call.id, call.name, call.arguments))
    role = "system" if turn.role == "developer" else turn.role
    return ChatMessage(role, turn.content, turn.reasoning or None, tuple(calls), turn.tool_call_id or None)


def _tools_from(messages: Iterable[pb.Tool]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    num_characters = 0
    for index, message in enumerate(messages):
        path = f"chat.tools.{index}"
        if not is_tool_name(message.name):
            raise InvalidRequest(
                f"{path}.name",
                f"must be 1 to 128 letters, digits and any of _.:/-, got {message.name[:60]!r}",
            )
        num_characters += len(message.parameters)
        if num_characters > MAX_SCHEMA_CHARACTERS:
            raise InvalidRequest(
                f"{path}.parameters",
                f"the schemas up to this one have more than {MAX_SCHEMA_CHARACTERS} characters",
            )
        text = message.parameters
        schema = _schema_from(text, f"{path}.parameters") if text else NO_ARGUMENTS
        tools.append(Tool(message.name, message.description or None, schema, message.strict))
    by_path = {f"chat.tools.{index}": tool for index, tool in enumerate(tools)}
    check_tools(by_path, "name", "parameters")
    return tuple(tools)


def _schema_from(text: str, path: str) -> dict[str, Any]:
    schema = _json_from(text, path)
    if not isinstance(schema, dict):
        raise InvalidRequest(path, "must be a JSON object")
    return schema


def _json_from(text: str, path: str) -> Any:
    """Parses JSON under the same rules as a body over HTTP."""
    try:
        return parse(text.encode())
    except NotStrict as error:
        raise InvalidRequest(path, f"invalid JSON: {error}") from error


def _tool_choice_from(message: pb.ToolChoice, tools: tuple[Tool, ...]) -> ToolChoice:
    if message.use not in USES_FROM_PB:
        raise InvalidRequest("chat.tool_choice.use", f"unknown value {message.use}")
    use = USES_FROM_PB[message.use]
    if use is ToolUse.REQUIRED and not tools:
        raise InvalidRequest("chat.tool_choice.use", "TOOL_USE_REQUIRED needs tools")
    for index, name in enumerate(message.names):
        check_among(tools, name, f"chat.tool_choice.names.{index}")
    return ToolChoice(use, tuple(dict.fromkeys(message.names)) or None)


def _reasoning_from(message: pb.ReasoningOptions) -> ReasoningOptions:
    return ReasoningOptions(
        message.enabled if message.HasField("enabled") else None,
        message.max_tokens if message.HasField("max_tokens") else None,
        message.effort or None,
    )


def _template_options_from(message: Mapping[str, str]) -> dict[str, Any]:
    options = {}
    for name, text in sorted(message.items()):
        options[name] = _json_from(text, f"chat.template_options.{name[:60]}")
    check_template_options("chat.template_options", options)
    return options


def _turn_to_message(turn: ChatMessage) -> pb.Chat.Message:
    return pb.Chat.Message(
        role=turn.role,
        content=turn.content,
        reasoning=turn.reasoning or "",
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls
        ],
        tool_call_id=turn.tool_call_id or "",
    )


def _tool_to_message(tool: Tool) -> pb.Tool:
    return pb.Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=json.dumps(tool.parameters),
        strict=tool.strict,
    )


def _tool_choice_to_message(choice: ToolChoice) -> pb.ToolChoice:
    return pb.ToolChoice(use=USES_TO_PB[choice.use], names=choice.names or ())


def _reasoning_to_message(options: ReasoningOptions) -> pb.ReasoningOptions:
    return pb.ReasoningOptions(
        enabled=options.is_enabled, max_tokens=options.max_tokens, effort=options.effort or ""
    )
