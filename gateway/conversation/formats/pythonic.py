"""Llama's Python style: an answer that is a list of calls, `[f(a=1, b='x'), g()]`.

Arguments are known as JSON once the whole call is there. As nothing marks a call but its form, it counts as one only
where the answer begins and a tool has its name. Guided values are JSON's; booleans may also be Python's.
"""

import json
from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.listed_properties import Property, listed_properties
from gateway.conversation.python_literals import keyword_arguments
from gateway.conversation.reader import Reader, Steps

MAX_CALL_CHARACTERS = 65_536
"""A longer call is text."""

ANY_LITERAL = r"""( /[a-zA-Z_]\w*/ "=" %json {} ( ", " /[a-zA-Z_]\w*/ "=" %json {} )* )?"""


class PythonicCalls:
    """A CallSyntax."""

    markers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    bare_beginning = r"\[\s*[a-zA-Z_][\w.]*\("
    repeats: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        reader.begin_attempt(MAX_CALL_CHARACTERS)
        yield from reader.skip_spaces()
        if not (yield from reader.skip("[")) or not (yield from _call(reader, calls)):
            return False
        while True:
            reader.begin_attempt(MAX_CALL_CHARACTERS)
            yield from reader.skip_spaces()
            if not (yield from reader.skip(",")) or not (yield from _call(reader, calls)):
                break
        reader.rewind()
        yield from reader.skip_optional("]")
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        written = [_arguments(lark, index, tool) for index, tool in enumerate(tools)]

        def calls_behind(before: str) -> str:
            """As one literal with the name, so that no text that begins alike hides it."""
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
    """Within an attempt."""
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
    """Keyword arguments in the order of the schema, optional ones or not."""
    if tool.tool is None:
        return ANY_LITERAL
    first, following = "", ""
    for number, part in reversed(list(enumerate(listed_properties(tool)))):
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
