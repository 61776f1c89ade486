"""OLMo 3: `<function_calls>`, calls in Python's notation with JSON values, one per line, and `</function_calls>`."""

from collections.abc import Sequence

from gateway.conversation.call_syntax import MAX_MISREAD, CallWriter, GuidedTool
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.python_call import MAX_CALL_CHARACTERS, python_arguments, read_python_call
from gateway.conversation.reader import MAX_ATTEMPT_CHARACTERS, Reader, Steps

BEGIN, END = "<function_calls>", "</function_calls>"


class OlmoCalls:
    """The CallSyntax of OLMo 3."""

    markers = (BEGIN,)
    tokens = (END,)
    bare_beginning = None
    between_sections: str | None = None

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        limit = MAX_CALL_CHARACTERS if calls.num_misread < MAX_MISREAD else MAX_ATTEMPT_CHARACTERS
        return (yield from reader.series("", "", lambda: read_python_call(reader, calls), END, limit))

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        calls = [
            f'{quoted(f"{tool.name}(")} {python_arguments(lark, index, tool)} ")"'
            for index, tool in enumerate(tools)
        ]
        call = lark.rule("python_call", one_of(calls))
        more = f'( "\\n" {call} )*' if is_parallel else ""
        return f"{call} {more} {lark.marker(END)}"
