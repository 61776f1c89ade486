"""GLM: `<tool_call>f`, then `<arg_key>a</arg_key>` and `<arg_value>x</arg_value>` for each argument, `</tool_call>`.

GLM-4.5, 4.6    newlines before each call, after the name, and after each tag except `<arg_key>` and `<arg_value>`
GLM-4.7, 5      no newlines

Strings have no quotes. All spaces and newlines between the tags belong to the string.
"""

from collections.abc import Sequence

from gateway.conversation.argument_tags import ArgumentTags
from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.reader import Reader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
TAGS = ArgumentTags(key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>")


class GlmCalls:
    """A CallSyntax that reads both notations. Its grammar has one of them."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = (END, *TAGS.tags)
    bare_beginning = None

    def __init__(self, gap: str) -> None:
        """`gap`: what the grammar has between tags. This is a newline for GLM-4.5 and 4.6, and nothing for GLM-4.7 and
        5."""
        self._gap = gap
        self.between_sections: str | None = gap

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        yield from reader.skip_spaces()
        name = yield from reader.word("< \t\r\n", 128)
        if not is_tool_name(name):
            return False
        yield from reader.skip_spaces()
        has_ended = yield from reader.skip_if_next(END)
        key = None if has_ended else (yield from TAGS.read_key(reader))
        if key is None and not has_ended:
            return False
        reader.commit()
        calls.begin(name)
        yield from TAGS.read(reader, calls, name, key)
        if has_ended or (yield from reader.skip_optional(END)):
            calls.add("}")
            calls.end()
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:  # noqa: ARG002
        arguments = TAGS.guided(lark, tools, self._gap)
        bodies = [
            f"{quoted(tool.name + self._gap)} {written}"
            for tool, written in zip(tools, arguments, strict=True)
        ]
        return f"{one_of(bodies)} {lark.marker(END)}"
