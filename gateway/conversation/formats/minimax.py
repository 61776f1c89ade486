"""MiniMax-M2: `<minimax:tool_call>`, an `<invoke name="f">` for each call, with a `<parameter name="a">` per argument.

Each tag ends a line, except the tag before a value. Strings have no quotes. All spaces and newlines between the tags
belong to the string.
"""

from collections.abc import Sequence

from gateway.conversation.argument_tags import ArgumentTags
from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.reader import Reader, Steps

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_BEGUN, INVOKE_END = '<invoke name="', '">', "</invoke>"
TAGS = ArgumentTags(key='<parameter name="', key_end='">', value_end="</parameter>")


class MiniMaxCalls:
    """The CallSyntax of MiniMax-M2."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = (END,)
    bare_beginning = None
    between_sections: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        return (yield from reader.series(INVOKE, INVOKE, lambda: _call(reader, calls), END))

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        arguments = TAGS.guided(lark, tools, gap="\n")
        bodies = [
            f"{quoted(f'{INVOKE}{tool.name}{INVOKE_BEGUN}{chr(10)}')} {written}"
            for tool, written in zip(tools, arguments, strict=True)
        ]
        call = lark.rule("call", f"{one_of(bodies)} {quoted(INVOKE_END + chr(10))}")
        return f'"\\n" {call} {f"( {call} )*" if is_parallel else ""} {lark.marker(END)}'


def _call(reader: Reader, calls: CallWriter) -> Steps[bool]:
    """Reads one call after its INVOKE, within an attempt. False: there is no call."""
    name = yield from reader.word('"\n', 128)
    if not is_tool_name(name) or not (yield from reader.skip(INVOKE_BEGUN)):
        return False
    reader.commit()
    calls.begin(name)
    yield from TAGS.read(reader, calls, name, (yield from TAGS.next_key(reader)))
    if (yield from reader.skip_optional(INVOKE_END)):
        calls.add("}")
        calls.end()
    return True
