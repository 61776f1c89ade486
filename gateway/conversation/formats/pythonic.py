"""Llama's Python style: the answer is a list of calls, such as `[f(a=1, b='x'), g()]`.

A call's arguments become JSON once the whole call has arrived. A call has no marker. So a text is a call only
at the beginning of the answer, and only if a tool has its name. In grammars, values are JSON; booleans and
null may also be Python's.
"""

import json
from collections.abc import Sequence

from baton.errors import InvalidRequest
from gateway.conversation.call_syntax import CallWriter, GuidedTool
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.listed_properties import Property, listed_properties
from gateway.conversation.python_literals import is_keyword, keyword_arguments
from gateway.conversation.reader import Reader, Steps

MAX_CALL_CHARACTERS = 65_536
"""The longest text that is read as calls. A longer text is ordinary text."""

ANY_LITERAL = r"""( /[a-zA-Z_]\w*/ "=" %json {} ( ", " /[a-zA-Z_]\w*/ "=" %json {} )* )?"""


class PythonicCalls:
    """The CallSyntax of Llama's Python style."""

    markers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    bare_beginning = r"\[\s*[a-zA-Z0-9_.:\/-]+\("  # as names of tools may be
    repeats: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        if not (yield from reader.series("[", ",", lambda: _call(reader, calls), MAX_CALL_CHARACTERS)):
            return False
        yield from reader.skip_optional("]")
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        written = [_arguments(lark, index, tool) for index, tool in enumerate(tools)]

        def calls_behind(before: str) -> str:
            """The calls of all tools, with `before` in front of each. Unless `is_beside_json`, `before` and
            the name are one literal, so that the lexer cannot take `before` alone as the beginning of other
            text."""
            heads = [
                f"{quoted(before)} {quoted(f'{tool.name}(')}"
                if tool.is_beside_json
                else quoted(f"{before}{tool.name}(")
                for tool in tools
            ]
            return one_of([f'{head} {arguments} ")"' for head, arguments in zip(heads, written, strict=True)])

        more = f"{calls_behind(', ')}*" if is_parallel else ""
        return f'{calls_behind("[")} {more} "]"'


def _call(reader: Reader, calls: CallWriter) -> Steps[bool]:
    """Reads one call, within an attempt. False: there is no call."""
    yield from reader.skip_spaces()
    name = yield from reader.word("(", 128)
    if name not in calls.tools or (source := (yield from reader.brackets())) is None:
        return False
    arguments = keyword_arguments(source[1:-1])
    if arguments is None:
        return False
    reader.commit()
    calls.begin(name)
    calls.add(json.dumps(arguments))
    calls.end()
    return True


def _arguments(lark: Lark, index: int, tool: GuidedTool) -> str:
    """The expression for keyword arguments in the order of the schema. Optional arguments may be missing."""
    if tool.tool is None:
        return ANY_LITERAL
    first, following = "", ""
    for number, part in reversed(list(enumerate(listed_properties(tool)))):
        if not is_keyword(part.name):
            raise InvalidRequest(
                "tools",
                f"this model writes arguments as Python does, so it cannot write {part.name[:60]!r} of '{tool.name}'",
            )
        written = f"{quoted(part.name + '=')} {_value(part)}"
        rest = f"rest_{index}_{number}"
        begun = f"{written} {following}"
        first = begun if part.is_required else f"( {begun} | {first} )" if first else f"( {begun} )?"
        behind = f'", " {written} {following}'
        lark.rule(rest, behind if part.is_required else f"{behind} | {following or quoted('')}")
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
