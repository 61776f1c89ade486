"""Llama's Python style: the answer is a list of calls, such as `[f(a=1, b='x'), g()]`.

A call's arguments become JSON once the whole call has arrived. A call has no marker. So a text is a call only
at the beginning of the answer, and only if a tool has its name.
"""

from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.python_call import MAX_CALL_CHARACTERS, python_arguments, read_python_call
from gateway.conversation.reader import Reader, Steps


class PythonicCalls:
    """The CallSyntax of Llama's Python style."""

    markers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    bare_beginning = r"\[\s*[a-zA-Z0-9_.:\/-]+\("  # the characters of tools' names
    between_sections: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        def read_call() -> Steps[bool]:
            return read_python_call(reader, calls, is_known=True)

        return (yield from reader.series("[", ",", read_call, "]", MAX_CALL_CHARACTERS))

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        written = [python_arguments(lark, index, tool) for index, tool in enumerate(tools)]

        def calls_after(before: str) -> str:
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

        more = f"{calls_after(', ')}*" if is_parallel else ""
        return f'{calls_after("[")} {more} "]"'
