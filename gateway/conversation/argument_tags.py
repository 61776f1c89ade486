"""ArgumentTags: parser and grammar for arguments that are written one by one between tags; strings have no quotes.

Arguments become JSON while they arrive: strings piece by piece, other values when they are complete.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest
from gateway.conversation.call_syntax import MAX_MISREAD, CallWriter, GuidedTool
from gateway.conversation.guided_schema import FORMATS
from gateway.conversation.json_call import one_of
from gateway.conversation.lark import Lark, escaped, quoted
from gateway.conversation.listed_properties import (
    TYPES,
    Property,
    listed_properties,
    property_schema,
    unlisted_property,
    value_types,
)
from gateway.conversation.python_literals import python_literal
from gateway.conversation.reader import Markers, Reader, Steps

MAX_VALUE_CHARACTERS = 65_536
"""Longest JSON value that may contain the text of its end tag. A longer value ends at this text, unless a grammar makes
it JSON."""
MAX_KEY_CHARACTERS = 500
_NOT_PLAIN = frozenset(
    {
        *("pattern", "minLength", "maxLength", "const"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref"),
    }
)
"""Keywords that limit a string further than `type` and `enum` do. Only a grammar of JSON can enforce them. `format` is
also such a keyword, if its value is one of FORMATS."""


class ArgumentTags:
    """The tags around an argument's key and around its value."""

    def __init__(self, *, key: str, key_end: str, value: str = "", value_end: str, padding: str = "") -> None:
        """`value`: the tag before a value; empty if the value follows `key_end` directly. `padding`: a newline between
        a value and its tags, which is not part of the value; empty if the model writes no such newline."""
        self.tags = (key, key_end, value, value_end) if value else (value_end,)
        """The tags, each of which may be a single token."""
        self._key, self._key_end, self._value, self._value_end = key, key_end, value, value_end
        self._padding = padding
        self._end = Markers((value_end,))

    def read(self, reader: Reader, calls: CallWriter, name: str, key: str | None) -> Steps[None]:
        """Reads the arguments of a call of the tool `name`, and passes them on as JSON without its closing brace.

        `key`: the first key, which was read already; None: there are no arguments.
        """
        calls.add("{")
        before = ""
        while key is not None:
            calls.add(f"{before}{json.dumps(key)}: ")
            before = ", "
            yield from self._read_value(
                reader, calls, self._types(calls, name, key), is_guided=calls.is_guided(name)
            )
            key = yield from self.next_key(reader)

    def next_key(self, reader: Reader) -> Steps[str | None]:
        """Reads the next argument's key and the tags around it. None: no argument follows; then nothing is read."""
        reader.begin_attempt()
        key = yield from self.read_key(reader)
        if key is None:
            reader.rewind()
        else:
            reader.commit()
        return key

    def read_key(self, reader: Reader) -> Steps[str | None]:
        """Does what `next_key` does, within an attempt that the caller ends."""
        yield from reader.skip_spaces()
        if not (yield from reader.skip(self._key)):
            return None
        key = yield from reader.word(f"{self._key_end[0]}\n", MAX_KEY_CHARACTERS)
        if not (yield from reader.skip(self._key_end)):
            return None
        if self._value:
            yield from reader.skip_spaces()
        return key if (yield from reader.skip(self._value)) else None

    def _types(self, calls: CallWriter, name: str, key: str) -> frozenset[str] | None:
        """The result of `value_types` for an argument. None: the argument's value is written without quotes. The work
        on a large schema is done once for an answer, not for each value."""
        tool = calls.tools.get(name)
        schema, root = property_schema(tool, key), {} if tool is None else tool.parameters
        if id(schema) in calls.types:
            return calls.types[id(schema)]
        types = None if self._is_plain(schema) else value_types(schema, root)
        if schema:
            calls.types[id(schema)] = types
        return types

    def _read_value(
        self, reader: Reader, calls: CallWriter, types: frozenset[str] | None, *, is_guided: bool
    ) -> Steps[None]:
        if self._padding and (yield from reader.peek()) == self._padding:
            reader.read_arrived(1)
        if types is not None:
            value = yield from self._json_value(reader, calls, types, is_guided=is_guided)
            if value is not None:
                calls.add(value)
            return
        calls.add('"')
        num_spaces, length = yield from reader.until(self._end, lambda text: calls.add(_within_quotes(text)))
        if length:
            calls.add(_within_quotes(reader.read_arrived(num_spaces).removesuffix(self._padding)) + '"')
            reader.read_arrived(length)

    def _json_value(
        self, reader: Reader, calls: CallWriter, types: frozenset[str], *, is_guided: bool
    ) -> Steps[str | None]:
        """Reads a value that is not plain text, and its end. None: the answer ended before the value did. `types`: the
        result of `value_types`. `is_guided`: the value is JSON.

        A JSON string may contain the tag after a value. So the value is first read as JSON, if it begins like
        JSON.
        """
        reader.begin_attempt(sys.maxsize if is_guided else MAX_VALUE_CHARACTERS)
        begin = (yield from reader.peek()) if calls.num_misread < MAX_MISREAD else ""
        kind = {'"': "string", "{": "object", "[": "array"}.get(begin)
        is_read = kind is not None and (not types or kind in types)
        value = (yield from _json(reader, begin, types)) if is_read else None
        if value is not None:
            yield from reader.skip_spaces()
            if (yield from reader.skip(self._value_end)):
                reader.commit()
                return value
        reader.rewind()
        if is_guided and is_read:
            reader.drop_unfinished()  # a string before the cut may contain the tag
        calls.num_misread += is_read
        pieces: list[str] = []
        num_spaces, length = yield from reader.until(self._end, pieces.append)
        text = "".join(pieces) + reader.read_arrived(num_spaces).removesuffix(self._padding)
        reader.read_arrived(length)
        return _as_json(text, types) if length else None

    def guided(self, lark: Lark, tools: Sequence[GuidedTool], gap: str) -> list[str]:
        """The Lark expressions for the arguments of each tool. `gap`: what the model writes between tags, and after
        the last tag. Raises InvalidRequest if a key cannot be written."""
        free = f"{lark.up_to('value', self._value_end)} {quoted(gap) if gap else ''}"
        return [self._arguments(lark, tool, free, gap) for tool in tools]

    def _arguments(self, lark: Lark, tool: GuidedTool, free: str, gap: str) -> str:
        after_key = f"{self._key_end}{f'{gap}{self._value}' if self._value else ''}{self._padding}"
        unlisted = None if tool.tool is None else unlisted_property(tool)
        if tool.tool is None or unlisted is not None:
            excluded = "".join(sorted({"<", ">", self._key_end[0]}))
            key = rf"/[^{escaped(excluded)}\n]{{1,64}}/"
            value = free if unlisted is None else self._written_value(lark, unlisted, free, gap)
            return f"( {self._marked(lark, self._key)} {key} {self._marked(lark, after_key)} {value} )*"
        written = []
        for part in listed_properties(tool):
            if len(part.name) > MAX_KEY_CHARACTERS or not {"\n", self._key_end[0]}.isdisjoint(part.name):
                raise InvalidRequest(
                    "tools",
                    f"this model writes names of arguments up to {self._key_end}, so it cannot write "
                    f"{part.name[:60]!r} of '{tool.name}'",
                )
            head = self._marked(lark, f"{self._key}{part.name}{after_key}")
            text = lark.counted(f"{head} {self._written_value(lark, part, free, gap)}")
            written.append(text if part.is_required else f"( {text} )?")
        return " ".join(written)

    def _written_value(self, lark: Lark, part: Property, free: str, gap: str) -> str:
        """The expression for a value and the end of its argument."""
        end = self._marked(lark, f"{self._padding}{self._value_end}{gap}")
        if not self._is_plain(part.schema):
            return f"%json {part.json_schema} {end}"
        if "enum" in part.schema:
            return f"{one_of([quoted(value) for value in part.schema['enum']])} {end}"
        return free

    def _marked(self, lark: Lark, text: str) -> str:
        return lark.marked(text, *self.tags)

    def _is_plain(self, schema: Mapping[str, Any]) -> bool:
        """Whether values of this schema are written without quotes. This is so if the schema allows every string, or
        lists strings only."""
        # A tuple is searched, as a `format` that is a list could not be looked up in a frozenset.
        if not _NOT_PLAIN.isdisjoint(schema) or schema.get("format") in tuple(FORMATS):
            return False
        if "enum" in schema:
            values = schema["enum"]
            return isinstance(values, list) and all(
                isinstance(value, str) and self._value_end not in value for value in values
            )
        return schema.get("type") == "string"


def _json(reader: Reader, begin: str, types: frozenset[str]) -> Steps[str | None]:
    """Reads a JSON string, object or array that begins with the character `begin`. None: no such value comes next."""
    if begin == '"':
        text = yield from reader.json_string()
        return None if text is None else _spaced(text)
    source = yield from reader.brackets()
    return None if source is None else _as_json(source, types)


def _within_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON. The model may have written JSON, a Python literal, or text without quotes. If the schema
    forbids the type of the JSON, but allows text, the value is text. A Python literal other than True, False and None
    is text, unless the schema forbids text."""
    literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json.loads(literal, parse_constant=_refuse)
        has_fraction = isinstance(value, float) and not value.is_integer()
        names = ("number",) if has_fraction else TYPES[type(value)]
        if "string" not in types or not types.isdisjoint(names):
            return _spaced(value) or literal.strip()
    except (ValueError, RecursionError):
        if types and "string" not in types:
            value = python_literal(text)
            if value is not None and not types.isdisjoint(TYPES[type(value)]):
                return _spaced(value)
    return json.dumps(text, ensure_ascii=False)


def _spaced(value: object) -> str:
    """The value as JSON; empty if it has a number that is too large for a float."""
    try:
        source = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return ""
    try:
        source.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(value)
    return source


def _refuse(constant: str) -> None:
    raise ValueError(constant)
