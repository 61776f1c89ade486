"""A call as one JSON object, as most families write calls: `{"name": "f", "arguments": {...}}`."""

import json
from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.guided_schema import SPACING_KEY, divisible
from gateway.conversation.lark import quoted
from gateway.conversation.reader import Reader, Steps
from gateway.conversation.schema_parts import DEFINITIONS

ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
"""Keys that models add. Their values are strings, which are ignored."""


def read_json_call(reader: Reader, calls: CallWriter, *, is_known: bool = False) -> Steps[bool]:
    """Reads one object, within an attempt. False: the object is no call. `is_known`: an object is a call only if its
    name is the name of a tool.

    The name must come before the arguments, as grammars make models write it.
    """
    yield from reader.skip_spaces()
    if not (yield from reader.skip("{")):
        return False
    name = ""
    while True:
        key = yield from _key(reader)
        if key in ARGUMENTS and name and (yield from reader.peek()) == "{":
            break
        value = (yield from reader.json_string()) if key in ("name", *OTHER_KEYS) else None
        if value is None:
            return False
        if key == "name":
            name = value
            if not is_tool_name(name) or (is_known and name not in calls.tools):
                return False
        yield from reader.skip_spaces()
        if (yield from reader.peek()) != ",":
            if not name or not (yield from reader.skip("}")):
                return False
            reader.commit()
            calls.begin(name)
            calls.add("{}")
            calls.end()
            return True
        reader.read_arrived(1)
    reader.commit()
    calls.begin(name)
    if (yield from reader.json_container(calls.add)):
        calls.end()
        yield from _read_end(reader)
    return True


def json_call(tool: GuidedTool, arguments_key: str = "arguments") -> str:
    """A grammar's expression for a call of this tool as a JSON object."""
    if tool.is_beside_json:
        return f"%json {_whole_schema(tool, arguments_key)}"
    head = f'{{"name": {quoted(tool.name)}, "{arguments_key}": '
    return f'{quoted(head)} %json {tool.schema} "}}"'


def _whole_schema(tool: GuidedTool, arguments_key: str) -> str:
    """The schema of the whole object. The definitions to which the schema of the arguments refers stay at the
    top."""
    arguments = divisible(tool.schema)
    shared = {key: arguments.pop(key) for key in (*DEFINITIONS, SPACING_KEY) if key in arguments}
    properties = {"name": {"const": tool.name}, arguments_key: arguments}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return json.dumps(schema | {"additionalProperties": False} | shared, ensure_ascii=False)


def one_of(alternatives: Sequence[str]) -> str:
    return f"( {' | '.join(alternatives)} )"


def _key(reader: Reader) -> Steps[str | None]:
    """Reads `"key":` and the spaces around it. Returns the key, or None if there is none."""
    yield from reader.skip_spaces()
    key = yield from reader.json_string()
    yield from reader.skip_spaces()
    if not (yield from reader.skip(":")):
        return None
    yield from reader.skip_spaces()
    return key


def _read_end(reader: Reader) -> Steps[None]:
    """Reads the end of the object after its arguments. If the text is not such an end, reads nothing."""
    reader.begin_attempt()
    yield from reader.skip_spaces()
    while (yield from reader.peek()) == ",":
        reader.read_arrived(1)
        if (yield from _key(reader)) not in OTHER_KEYS or (yield from reader.json_string()) is None:
            break
        yield from reader.skip_spaces()
    if (yield from reader.skip("}")):
        reader.commit()
    else:
        reader.rewind()
