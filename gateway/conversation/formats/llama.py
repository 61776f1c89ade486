"""Llama 3 and 4: an answer that is a JSON object `{"name": "f", "parameters": {...}}`, or several with `;` between.

Nothing marks a call but its form, so it counts as one only where the answer begins (or behind `<|python_tag|>`) and
where a tool has its name.
"""

from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool
from gateway.conversation.json_call import json_call, one_of, read_json_call
from gateway.conversation.lark import Lark
from gateway.conversation.reader import Reader, Steps

BEGIN = "<|python_tag|>"


class LlamaCalls:
    """A CallSyntax."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = ()
    bare_beginning = r'\{\s*"(name|type|id)"\s*:\s*"'
    repeats: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        yield from reader.skip_spaces()
        if not (yield from read_json_call(reader, calls, is_known=True)):
            return False
        while True:
            reader.begin_attempt()
            yield from reader.skip_spaces()
            if not (yield from reader.skip(";")):
                break
            yield from reader.skip_spaces()
            if not (yield from read_json_call(reader, calls, is_known=True)):
                break
        reader.rewind()
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        call = lark.rule("call", one_of([json_call(tool, "parameters") for tool in tools]))
        return f'{call} ( "; " {call} )*' if is_parallel else call
