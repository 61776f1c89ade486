"""Hermes and Qwen: each call is `<tool_call>`, a JSON object, and `</tool_call>`."""

from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool
from gateway.conversation.json_call import json_call, one_of, read_json_call
from gateway.conversation.lark import Lark
from gateway.conversation.reader import Reader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesCalls:
    """The CallSyntax of Hermes and Qwen."""

    markers = (BEGIN,)
    tokens = (END,)
    bare_beginning = None
    between_sections = "\n"

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        if not (yield from read_json_call(reader, calls)):
            return False
        yield from reader.skip_optional(END)
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:  # noqa: ARG002
        return f'"\\n" {one_of([json_call(tool) for tool in tools])} "\\n" {lark.marker(END)}'
