"""Qwen3-Coder: `<tool_call>`, `<function=f>`, one `<parameter=a>` per argument; strings have no quotes.

Arguments become JSON while they arrive: strings piece by piece, other values when they are complete.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.conversation.call_syntax import CallWriter, GuidedTool, is_tool_name
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, quoted
from gateway.conversation.listed_properties import Property, listed_properties, property_schema
from gateway.conversation.reader import Markers, Reader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_VALUE_CHARACTERS = 65_536
"""Longest JSON value that may contain the text `</parameter>`. A longer value ends at this text."""
MAX_MISREAD = 8
"""Most values of an answer that may begin like JSON but be none, because each is read twice."""
_VALUE_END = Markers((PARAMETER_END,))
_NOT_PLAIN = frozenset(
    {
        *("pattern", "format", "minLength", "maxLength", "const"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref"),
    }
)
"""Keywords beside `type` or `enum` that limit a string: only a grammar of JSON can follow them."""


class QwenCoderCalls:
    """The CallSyntax of Qwen3-Coder."""

    markers: tuple[str, ...] = (BEGIN,)
    tokens: tuple[str, ...] = (END,)
    bare_beginning = None
    repeats: str | None = "\n"

    def read(self, reader: Reader, calls: CallWriter) -> Steps[bool]:
        yield from reader.skip_spaces()
        if not (yield from reader.skip(FUNCTION)):
            return False
        name = yield from reader.word(">\n", 128)
        if not is_tool_name(name) or not (yield from reader.skip(">")):
            return False
        reader.commit()
        calls.begin(name)
        calls.add("{")
        before = ""
        while (key := (yield from _key(reader))) is not None:
            calls.add(f"{before}{json.dumps(key)}: ")
            before = ", "
            yield from _read_value(reader, calls, property_schema(calls.tools.get(name), key))
        if (yield from reader.skip_optional(FUNCTION_END)):
            calls.add("}")
            calls.end()
            yield from reader.skip_optional(END)
        return True

    def section(self, lark: Lark, tools: Sequence[GuidedTool], is_parallel: bool) -> str:  # noqa: ARG002
        free = f"{lark.up_to('value', PARAMETER_END)} {quoted(chr(10))}"
        bodies = [f"{quoted(f'{FUNCTION}{tool.name}>{chr(10)}')} {_parameters(tool, free)}" for tool in tools]
        return f'"\\n" {one_of(bodies)} {quoted(FUNCTION_END + chr(10))} {lark.marker(END)}'


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether a value is written without quotes: any string, or one of several listed strings."""
    if not _NOT_PLAIN.isdisjoint(schema):
        return False
    if "enum" in schema:
        values = schema["enum"]
        return isinstance(values, list) and all(
            isinstance(value, str) and PARAMETER_END not in value for value in values
        )
    return schema.get("type") == "string"


def _key(reader: Reader) -> Steps[str | None]:
    """The next parameter's name; None if no parameter follows."""
    reader.begin_attempt()
    yield from reader.skip_spaces()
    if (yield from reader.skip(PARAMETER)):
        key = yield from reader.word(">\n", 500)
        if (yield from reader.skip(">")):
            reader.commit()
            return key
    reader.rewind()
    return None


def _read_value(reader: Reader, calls: CallWriter, schema: Mapping[str, Any]) -> Steps[None]:
    if (yield from reader.peek()) == "\n":
        reader.read_arrived(1)
    if not _is_plain(schema):
        value = yield from _json_value(reader, calls)
        if value is not None:
            calls.add(value)
        return
    calls.add('"')
    num_spaces, length = yield from reader.until(_VALUE_END, lambda text: calls.add(_within_quotes(text)))
    if length:
        calls.add(_within_quotes(reader.read_arrived(num_spaces).removesuffix("\n")) + '"')
        reader.read_arrived(length)


def _json_value(reader: Reader, calls: CallWriter) -> Steps[str | None]:
    """Reads a value that is not plain text, and its end. None: the answer ended first.

    A JSON string may contain the text `</parameter>`. So the value is first read as JSON, if it begins like
    JSON.
    """
    reader.begin_attempt(MAX_VALUE_CHARACTERS)
    begin = (yield from reader.peek()) if calls.num_misread < MAX_MISREAD else ""
    if begin == '"':
        text = yield from reader.json_string()
        value = None if text is None else json.dumps(text, ensure_ascii=False)
    else:
        source = (yield from reader.brackets()) if begin and begin in "{[" else None
        value = None if source is None else _as_json(source)
    if value is not None:
        yield from reader.skip_spaces()
        if (yield from reader.skip(PARAMETER_END)):
            reader.commit()
            return value
    reader.rewind()
    calls.num_misread += bool(begin) and begin in '"{['
    pieces: list[str] = []
    num_spaces, length = yield from reader.until(_VALUE_END, pieces.append)
    reader.read_arrived(num_spaces + length)
    return _as_json("".join(pieces)) if length else None


def _within_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """The value as JSON. The model may have written JSON, a Python literal, or text without quotes."""
    literal = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        return json.dumps(json.loads(literal, parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _parameters(tool: GuidedTool, free: str) -> str:
    if tool.tool is None:
        return rf'( {quoted(PARAMETER)} /[^<>\n]{{1,64}}/ ">\n" {free} )*'
    written = []
    for part in listed_properties(tool):
        text = f"{quoted(f'{PARAMETER}{part.name}>{chr(10)}')} {_value(part, free)}"
        written.append(text if part.is_required else f"( {text} )?")
    return " ".join(written)


def _value(part: Property, free: str) -> str:
    """The expression for a value and the end of its parameter."""
    end = quoted(f"\n{PARAMETER_END}\n")
    if not _is_plain(part.schema):
        return f"%json {part.json_schema} {end}"
    if "enum" in part.schema:
        return f"{one_of([quoted(value) for value in part.schema['enum']])} {end}"
    return free
