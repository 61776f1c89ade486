"""Mistral: `[TOOL_CALLS]` and an array of calls; newer: `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.json_call import json_call, one_of, read_json_call
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.reader import Reader, Steps

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralCalls:
    """The CallSyntax of older models: one array of calls."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = ()
    bare_beginning = None
    between_sections: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        return (yield from reader.series("[", ",", lambda: read_json_call(reader, calls), "]"))

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        call = lark.rule("call", one_of([json_call(tool) for tool in tools]))
        more = f'( ", " {call} )*' if is_parallel else ""
        return f'( " " )? "[" {call} {more} "]"'


class MistralNamedCalls:
    """The CallSyntax of newer models: a name and its arguments for each call."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = (ID, ARGUMENTS)
    bare_beginning = None
    between_sections: str | None = ""

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        yield from reader.skip_spaces()
        name = (yield from reader.word("[{ \n", 200)).strip()
        if not is_tool_name(name):
            return False
        if (yield from reader.skip_if_next(ID)):
            yield from reader.word("[{", 200)
        yield from reader.skip_if_next(ARGUMENTS)
        yield from reader.skip_spaces()
        if (yield from reader.peek()) != "{":
            return False
        reader.commit()
        calls.begin(name)
        if (yield from reader.json_container(calls.add)):
            calls.end()
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:  # noqa: ARG002
        marker = lark.marker(ARGUMENTS)
        return one_of([f"{quoted(tool.name)} {marker} %json {tool.schema}" for tool in tools])
