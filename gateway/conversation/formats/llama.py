"""Llama 3 and 4: the answer is `{"name": "f", "parameters": {...}}`, or several of these, with `;` between.

A call need not have a marker. So an object is a call only at the beginning of the answer, or after `<|python_tag|>`,
and only if a tool has its name.
"""

from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool
from gateway.conversation.json_call import json_call, one_of, read_json_call
from gateway.conversation.lark import Lark
from gateway.conversation.reader import Reader, Steps

BEGIN = "<|python_tag|>"


class LlamaCalls:
    """The CallSyntax of Llama 3 and 4."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = ()
    bare_beginning = r'\{\s*"(name|type|id)"\s*:\s*"'
    between_sections: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        return (yield from reader.series("", ";", lambda: read_json_call(reader, calls, is_known=True)))

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        call = lark.rule("call", one_of([json_call(tool, "parameters") for tool in tools]))
        return f'{call} ( "; " {call} )*' if is_parallel else call
