"""Reads Python literals, and keyword arguments with such values, as in `a=1, b=[None]`.

Python's own compiler is not used, because it may recurse too deep.
"""

import math
import re
from typing import Any

MAX_DEPTH = 64
NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

ESCAPES = {
    **{character: character for character in "'\"/\\"},
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\n": "",
}

_ESCAPE = re.compile(
    r"\\(?:(?P<code>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|(?P<character>.))", re.DOTALL
)
_KEYWORD = re.compile(r"[^\W\d][\w.$-]*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")
    | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<name>[^\W\d][\w.$-]*)
    | (?P<sign>[\[\]{}(),:=]))\s*""",
    re.VERBOSE | re.DOTALL,
)


def is_keyword(name: str) -> bool:
    """Whether `keyword_arguments` reads this name. Names in JSON schemas may have hyphens, dots and dollar signs, which
    Python's names may not have."""
    return _KEYWORD.fullmatch(name) is not None


def keyword_arguments(source: str) -> dict[str, Any] | None:
    """The arguments. If a name comes twice, the last value counts, as in JSON. None if the text is something else, is
    nested too deep, or has a value that JSON cannot express."""
    try:
        return _Literals(source).keywords()
    except (ValueError, IndexError):
        return None


def python_literal(source: str) -> Any:
    """The value of a literal. None if the text is something else, is nested too deep, or has a value that JSON cannot
    express."""
    try:
        return _Literals(source).literal()
    except (ValueError, IndexError):
        return None


class _Literals:
    """Reads the tokens of a source. Raises ValueError or IndexError if the source is invalid."""

    def __init__(self, source: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        source, at = source.strip(), 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None or found.lastgroup is None:
                raise ValueError("no token")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self._at = 0

    def keywords(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while self._at < len(self._tokens):
            kind, name = self._next_token()
            self._expect("=")
            if kind != "name":
                raise ValueError("no keyword")
            arguments[name] = self._value(1)
            if self._at < len(self._tokens):
                self._expect(",")
        return arguments

    def literal(self) -> Any:
        value = self._value(1)
        if self._at < len(self._tokens):
            raise ValueError("more than a literal")
        return value

    def _value(self, depth: int) -> Any:
        kind, text = self._next_token()
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if kind == "string":
            return _string(text[1:-1])
        if kind == "number":
            return _number(text)
        if kind == "name":
            if text not in NAMES:
                raise ValueError("no literal")
            return NAMES[text]
        if text in "[(":
            return self._items("]" if text == "[" else ")", depth)
        if text == "{":
            return self._pairs(depth)
        raise ValueError("no value")

    def _items(self, end: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while self._tokens[self._at][1] != end:
            items.append(self._value(depth + 1))
            if self._tokens[self._at][1] != end:
                self._expect(",")
        self._at += 1
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while self._tokens[self._at][1] != "}":
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("no key of JSON")
            self._expect(":")
            pairs[key] = self._value(depth + 1)
            if self._tokens[self._at][1] != "}":
                self._expect(",")
        self._at += 1
        return pairs

    def _next_token(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, sign: str) -> None:
        if self._next_token() != ("sign", sign):
            raise ValueError(f"no {sign}")


def _string(inside: str) -> str:
    """The string between the quotes, in Python's or JSON's notation. An unknown escape stays as it is."""
    text = _ESCAPE.sub(_escaped, inside)
    # This joins pairs of surrogates, and raises ValueError for a surrogate without its other half.
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _escaped(found: re.Match[str]) -> str:
    code, character = found["code"], found["character"]
    return chr(int(code[1:], 16)) if code else ESCAPES.get(character, "\\" + character)


def _number(text: str) -> int | float:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("no number of JSON")
    return value
