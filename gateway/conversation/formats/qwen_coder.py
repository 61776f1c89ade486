"""Qwen3-Coder: `<tool_call>`, `<function=f>`, one `<parameter=a>` per argument; strings have no quotes."""

from collections.abc import Sequence

from gateway.conversation.argument_tags import ArgumentTags
from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.reader import Reader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
TAGS = ArgumentTags(key="<parameter=", key_end=">", value_end="</parameter>", padding="\n")


class QwenCoderCalls:
    """The CallSyntax of Qwen3-Coder."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = (END,)
    bare_beginning = None
    between_sections: str | None = "\n"

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        yield from reader.skip_spaces()
        if not (yield from reader.skip(FUNCTION)):
            return False
        name = yield from reader.word(">\n", 128)
        if not is_tool_name(name) or not (yield from reader.skip(">")):
            return False
        reader.commit()
        calls.begin(name)
        yield from TAGS.read(reader, calls, name, (yield from TAGS.next_key(reader)))
        if (yield from reader.skip_optional(FUNCTION_END)):
            calls.add("}")
            calls.end()
            yield from reader.skip_optional(END)
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:  # noqa: ARG002
        arguments = TAGS.guided(lark, tools, gap="\n")
        bodies = [
            f"{quoted(f'{FUNCTION}{tool.name}>{chr(10)}')} {written}"
            for tool, written in zip(tools, arguments, strict=True)
        ]
        return f'"\\n" {one_of(bodies)} {quoted(FUNCTION_END + chr(10))} {lark.marker(END)}'
