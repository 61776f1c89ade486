"""A call in Python's notation, such as `f(a=1, b='x')`. In grammars, values are written as JSON; `True`, `False` and
`None` are also allowed."""

import json

from baton.errors import InvalidRequest
from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.listed_properties import Property, listed_properties, unlisted_property
from gateway.conversation.python_literals import is_keyword, keyword_arguments
from gateway.conversation.reader import MAX_ATTEMPT_CHARACTERS, Reader, Steps

MAX_CALL_CHARACTERS = 65_536
"""The longest text that is read as calls. A longer text is ordinary text."""


def read_python_call(reader: Reader, calls: CallWriter, *, is_known: bool = False) -> Steps[bool]:
    """Reads one call, within an attempt. False: there is no call. `is_known`: a text is a call only if its name is the
    name of a tool."""
    yield from reader.skip_spaces()
    name = yield from reader.word("(", 128)
    if not is_tool_name(name) or (is_known and name not in calls.tools):
        return False
    source = yield from reader.brackets()
    arguments = None if source is None else keyword_arguments(source[1:-1])
    if arguments is None:
        calls.num_misread += reader.num_tried > MAX_ATTEMPT_CHARACTERS
        return False
    reader.commit()
    calls.begin(name)
    calls.add(json.dumps(arguments))
    calls.end()
    return True


def python_arguments(lark: Lark, index: int, tool: GuidedTool) -> str:
    """The expression for keyword arguments in the order of the schema. Optional arguments may be missing."""
    unlisted = None if tool.tool is None else unlisted_property(tool)
    if tool.tool is None or unlisted is not None:
        argument = rf'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" {"%json {}" if unlisted is None else _value(unlisted)}'
        return f'( {argument} ( ", " {argument} )* )?'
    first, following = "", ""
    for number, part in reversed(list(enumerate(listed_properties(tool)))):
        if not is_keyword(part.name):
            raise InvalidRequest(
                "tools",
                f"this model writes arguments as Python does, so it cannot write {part.name[:60]!r} of '{tool.name}'",
            )
        written = lark.counted(f"{quoted(part.name + '=')} {_value(part)}")
        rest = f"rest_{index}_{number}"
        begun = f"{written} {following}"
        first = begun if part.is_required else f"( {begun} | {first} )" if first else f"( {begun} )?"
        later_argument = f'", " {written} {following}'
        lark.rule(
            rest, later_argument if part.is_required else f"{later_argument} | {following or quoted('')}"
        )
        following = rest
    return first


def _value(part: Property) -> str:
    match part.schema:
        case {"type": "boolean"} if part.schema.keys() <= {"type", "description", "default", "title"}:
            return '( "True" | "False" | "true" | "false" )'
        case {"type": "null"}:
            return '( "None" | "null" )'
        case _:
            return f"%json {part.json_schema}"
