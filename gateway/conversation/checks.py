"""Checks of conversations for all APIs. Errors contain the path of a field in the caller's API."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from baton.errors import InvalidRequest
from gateway.conversation.messages import ChatMessage, Tool, ToolCall
from gateway.conversation.template import is_object
from gateway.strict_json import MAX_VALUES, NotStrict, count_values

MAX_MESSAGES = 4096
MAX_CALLS = 128
"""One message has at most this many tool calls."""
MAX_TOOLS = 128
"""A chat has at most this many tools, as in OpenAI's API."""
MAX_SCHEMA_CHARACTERS = 2**20
"""The schemas of all tools together have at most this many characters. Each schema is part of the prompt."""
MAX_PARSED_CHARACTERS = 2**18
"""At most this many characters of calls' arguments are parsed on the event loop. Further arguments are parsed with the
chat template, where an error does not name the call's field."""


def with_tools_named(messages: Sequence[ChatMessage], path: str, arguments: str) -> tuple[ChatMessage, ...]:
    """The messages, with the tool's name added to each result of a tool. `arguments`: the path of the arguments within
    a call.

    Raises InvalidRequest if a result belongs to no earlier call, if two calls of a message have the same id, or if
    a call's arguments are not a JSON object.
    """
    check_arguments(
        (f"{path}.{index}.tool_calls.{number}.{arguments}", call.arguments)
        for index, turn in enumerate(messages)
        for number, call in enumerate(turn.tool_calls)
    )
    turns: list[ChatMessage] = []
    name_of: dict[str, str] = {}
    for index, turn in enumerate(messages):
        if turn.tool_calls:
            name_of |= _names_of(turn.tool_calls, f"{path}.{index}")
        turns.append(turn if turn.tool_call_id is None else _named(turn, name_of, f"{path}.{index}"))
    return tuple(turns)


def check_arguments(by_path: Iterable[tuple[str, str]]) -> None:
    """InvalidRequest if the arguments of a call are not a JSON object. `by_path`: for each call, the path of its
    arguments, and the arguments."""
    num_characters = 0
    for path, arguments in by_path:
        num_characters += len(arguments)
        if num_characters > MAX_PARSED_CHARACTERS:
            return
        if not is_object(arguments):
            raise InvalidRequest(path, "must be a JSON object as text; leave out a call that was cut off")


def check_num_values(messages: Iterable[ChatMessage]) -> None:
    """Raises InvalidRequest if the arguments of all calls together have more values than one body may have. While
    a text is parsed, no other thread runs: millions of values would take seconds."""
    calls = (call for turn in messages for call in turn.tool_calls)
    try:
        num_values = sum(count_values(call.arguments.encode(errors="surrogatepass")) for call in calls)
    except NotStrict as error:
        raise InvalidRequest("chat", f"the arguments of a call: {error}") from error
    if num_values > MAX_VALUES:
        raise InvalidRequest(
            "chat", f"the arguments of all calls together have more than {MAX_VALUES} values"
        )


def _names_of(calls: Sequence[ToolCall], path: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for index, call in enumerate(calls):
        if call.id in names:
            raise InvalidRequest(
                f"{path}.tool_calls.{index}.id",
                "another call of this message has the same id; give each call its own id",
            )
        names[call.id] = call.name
    return names


def _named(result: ChatMessage, name_of: dict[str, str], path: str) -> ChatMessage:
    assert result.tool_call_id is not None, "the caller has looked"
    name = name_of.get(result.tool_call_id)
    if name is None:
        raise InvalidRequest(
            f"{path}.tool_call_id",
            f"no earlier message of the assistant has a call {result.tool_call_id[:60]!r}",
        )
    if result.name not in (None, name):
        raise InvalidRequest(f"{path}.name", f"the call was to {name[:60]!r}, got {result.name[:60]!r}")
    return replace(result, name=name)


def check_tools(tools: Mapping[str, Tool], name: str, schema: str) -> None:
    """Raises InvalidRequest if two tools have the same name, or if a tool's schema is not the schema of an object.
    `tools`: the tools by their paths in the request. `name` and `schema`: the paths of a tool's name and schema within
    the tool."""
    path_of: dict[str, str] = {}
    for path, tool in tools.items():
        if (first := path_of.setdefault(tool.name, path)) != path:
            raise InvalidRequest(f"{path}.{name}", f"{first} is called {tool.name!r} too; rename one")
        if (kind := tool.parameters.get("type", "object")) != "object":
            raise InvalidRequest(f"{path}.{schema}.type", f"must be 'object', got {str(kind)[:60]!r}")


def check_among(tools: Sequence[Tool], name: str, path: str) -> None:
    """Raises InvalidRequest if no tool has this name."""
    if not any(tool.name == name for tool in tools):
        known = ", ".join(repr(tool.name) for tool in tools[:8]) + (", ..." if len(tools) > 8 else "")
        raise InvalidRequest(path, f"{name[:64]!r} is not one of the tools; the tools are: {known or 'none'}")
