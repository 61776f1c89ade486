"""Strict JSON: accepts only text that RFC 8259 allows, that is unambiguous, and that is within bounds.

Parsers accept more, such as numbers beyond a double, or repeated keys. Different parsers read such a text
differently, so it is refused here. The checks block the event loop, so they are fast: a few calls, each of
which scans the whole text. pydantic's own parser refuses NaN, lone surrogates and invalid UTF-8.
"""

import codecs
import json
import math
import re
from typing import Any

from pydantic_core import from_json

MAX_DEPTH = 64
"""Lists and objects are nested at most this many levels deep. JSON schemas are the deepest legitimate input."""
MAX_VALUES = 2**18
"""One text has at most this many values. A prompt's token ids are the largest legitimate input."""
MAX_KEYS = 2**12
"""One object has at most this many keys; pydantic reports each unknown key."""
MAX_INTEGER, MIN_INTEGER = 2**64 - 1, -(2**63)
MAX_SEARCHED_BYTES = 2**16
"""For a larger text, the error about a repeated key does not name the key."""

_BRACKET = re.compile(rb"[\[\]{}]")
_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_NUMBERS = (b"0" * 19, b"0e")
"""A number beyond 64 bits contains one of these after the translation by `_SHAPE`: at least 19 digits, or an
exponent."""

_NESTED = frozenset((dict, list))

_HINTS = {
    "hex escape": "; a lone surrogate is not a character",
    "unicode code point": "; the body must be UTF-8",
}
"""What to add to the parser's message, by a fragment of that message."""


class NotStrict(ValueError):
    """The text is not JSON, or it is ambiguous."""


def parse(body: bytes) -> Any:
    """The parsed value. Its strings can be encoded, its numbers are finite, and its integers fit into 64 bits.

    Raises NotStrict with the reason if the text is refused.
    """
    if body.startswith(codecs.BOM_UTF8):
        raise NotStrict("starts with a byte order mark; remove it")
    structure = _without_strings(body)
    _check_size(structure)
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        hint = next((hint for words, hint in _HINTS.items() if words in str(error)), "")
        raise NotStrict(f"{error}{hint}") from error
    shape = structure.translate(_SHAPE)
    num_keys = _check(value, has_large_numbers=any(number in shape for number in _LARGE_NUMBERS))
    if num_keys != structure.count(b":"):
        raise NotStrict(f"{_repeated_key(body)} appears twice in one object")
    return value


def count_values(body: bytes) -> int:
    """An upper bound for the number of values, found without parsing the text. Raises NotStrict if there are very
    many."""
    return _num_values(_without_strings(body))


def _num_values(structure: bytes) -> int:
    return structure.count(b",") + structure.count(b"[") + structure.count(b"{")


def _without_strings(body: bytes) -> bytes:
    """The body's brackets, commas, colons, numbers and literals. In JSON, backslashes appear only in
    strings."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * MAX_VALUES:  # each key and each value may have two quotes
        raise NotStrict(f"there are more than {MAX_VALUES} values")
    return b"".join(bare.split(b'"')[::2])


def _check_size(structure: bytes) -> None:
    """Checks the number of values and the depth before the body is parsed."""
    if _num_values(structure) > MAX_VALUES:
        raise NotStrict(f"there are more than {MAX_VALUES} values")
    if structure.count(b"[") + structure.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.findall(structure):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise NotStrict(f"lists and objects are nested more than {MAX_DEPTH} levels deep")


def _check(value: Any, *, has_large_numbers: bool) -> int:
    """Checks the parsed value, and returns the number of keys of all objects together.

    If `has_large_numbers` is false, only lists and objects are visited.
    """
    num_keys = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if len(item) > MAX_KEYS:
                raise NotStrict(f"an object has more than {MAX_KEYS} keys")
            num_keys += len(item)
            item = list(item.values())
        elif not isinstance(item, list):
            _check_number(item)
            continue
        if has_large_numbers:
            waiting += item
        elif not _NESTED.isdisjoint(map(type, item)):  # skips long lists of numbers, which are common
            waiting += [each for each in item if type(each) in _NESTED]
    return num_keys


def _check_number(value: Any) -> None:
    is_too_large = (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER
    )
    if is_too_large:
        digits = str(value)
        shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
        raise NotStrict(f"{shown} does not fit into 64 bits")


def _repeated_key(body: bytes) -> str:
    found = "a key"

    def note(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found = repr(key[:40])
            seen.add(key)

    if len(body) <= MAX_SEARCHED_BYTES:
        json.loads(body, object_pairs_hook=note)
    return found
