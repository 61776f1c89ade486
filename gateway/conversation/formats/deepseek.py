"""DeepSeek: special tokens surround a section of calls, and each call with its name and JSON arguments.

V3, R1    <calls begin> <call begin>function<sep>NAME, newline, ```json, {...}, ```<call end> ... <calls end>
V3.1      <calls begin> <call begin>NAME<sep>{...}<call end> ... <calls end>
"""

from collections.abc import Sequence

from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.reader import Reader, Steps


def token(name: str) -> str:
    """A special token of DeepSeek: it has full-width bars, and `\u2581` for a space."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


BEGIN, END = token("tool calls begin"), token("tool calls end")
CALL, CALL_END, SEPARATOR = token("tool call begin"), token("tool call end"), token("tool sep")
KIND = "function"
FENCE, FENCE_END = "```json\n", "\n```"


class DeepSeekCalls:
    """A CallSyntax that reads both notations. Its grammar has one of them."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = (END, CALL, CALL_END, SEPARATOR)
    bare_beginning = None
    between_sections: str | None = None

    def __init__(self, *, is_fenced: bool) -> None:
        """`is_fenced`: the grammar has V3's notation, otherwise V3.1's."""
        self._is_fenced = is_fenced

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        return (yield from reader.series(CALL, CALL, lambda: _call(reader, calls), END))

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:
        begin, end, separator = map(lark.marker, (CALL, CALL_END, SEPARATOR))
        bodies = [self._body(tool, separator) for tool in tools]
        call = lark.rule("call", f"{begin} {one_of(bodies)} {end}")
        between = '"\\n"' if self._is_fenced else ""
        more = f"( {between} {call} )*" if is_parallel else ""
        return f"{call} {more} {lark.marker(END)}"

    def _body(self, tool: GuidedTool, separator: str) -> str:
        if self._is_fenced:
            head = quoted(f"{tool.name}\n{FENCE}")
            return f"{quoted(KIND)} {separator} {head} %json {tool.schema} {quoted(FENCE_END)}"
        return f"{quoted(tool.name)} {separator} %json {tool.schema}"


def _call(reader: Reader, calls: CallWriter) -> Steps[bool]:
    """Reads one call after its CALL, within an attempt. False: there is no call."""
    name = (yield from reader.word("<", 200)).strip()
    if not (yield from reader.skip(SEPARATOR)):
        return False
    yield from reader.skip_spaces()
    is_fenced = name == KIND and (yield from reader.peek()) != "{"
    if is_fenced:
        name = (yield from reader.word("\n`{<", 200)).strip()
        yield from reader.skip_spaces()
        yield from reader.skip_if_next("```json")
        yield from reader.skip_spaces()
    if not is_tool_name(name) or (yield from reader.peek()) != "{":
        return False
    reader.commit()
    calls.begin(name)
    if (yield from reader.json_container(calls.add)):
        calls.end()
        if is_fenced:
            yield from reader.skip_optional("```")
        yield from reader.skip_optional(CALL_END)
    return True
