"""Strict JSON: what the standard allows (RFC 8259) and means one thing only, within bounds, or an error that says why.

Parsers take more: numbers beyond a double, a key twice. What such a body means is up to whoever reads it, so it is
refused before anybody does. The event loop stands still meanwhile, so all of it is done by few calls that read the
whole body each; pydantic's own parser refuses the rest (NaN, half of a surrogate pair, what is not UTF-8).
"""

import codecs
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

MAX_DEPTH = 64
"""Of lists and objects within each other; a JSON schema is the deepest thing that anybody sends."""
MAX_VALUES = 2**18
"""A prompt's token ids are the most that anybody sends."""
MAX_KEYS = 2**12
"""Of one object, since pydantic finds fault with each that it does not know."""
MAX_INTEGER, MIN_INTEGER = 2**64 - 1, -(2**63)
MAX_SEARCHED_BYTES = 2**16
"""In larger bodies nobody looks for the key that is given twice."""

_BRACKET = re.compile(rb"[\[\]{}]")
_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_NUMBERS = (b"0" * 19, b"0e")
"""What 64 bits cannot hold has as many digits, or an exponent."""

_HINTS = {
    "hex escape": "; half of a surrogate pair is no character",
    "unicode code point": "; this is not UTF-8",
}
"""By the parser's words."""


class NotStrict(ValueError):
    """It is no JSON, or more than one reader would make the same of it."""


def parse(body: bytes) -> Any:
    """NotStrict says what is wrong. A text that is returned can be encoded, a number is finite and has 64 bits."""
    if body.startswith(codecs.BOM_UTF8):
        raise NotStrict("it begins with a byte order mark; send it without")
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
        raise NotStrict(f"{_repeated_key(body)} is given twice in one object")
    return value


class JsonRoute(APIRoute):
    """A route whose body is strict JSON. Every route that reads a body is one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def body(self) -> bytes:
        """FastAPI reads it where a route takes a body, and parses only what says that it is JSON."""
        if _has_body(self.headers):
            _check_kind(self.headers)
        return await super().body()

    async def json(self) -> Any:
        """A JSONDecodeError is what FastAPI answers as a mistake of the client's."""
        if not hasattr(self, "_json"):
            try:
                self._json = parse(await self.body())
            except NotStrict as error:
                raise json.JSONDecodeError(str(error), "", 0) from error
        return self._json


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_kind(headers: Headers) -> None:
    """HTTPException before anything of the body is read."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"send JSON as content-type application/json, got {kind[:60] or 'none'!r}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"send JSON as it is, without content-encoding, got {encoding[:60]!r}")


def _without_strings(body: bytes) -> bytes:
    """Brackets, commas, colons and numbers: in JSON, a backslash stands in strings only, and most often for itself."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * MAX_VALUES:  # two for each key and each value
        raise NotStrict(f"it holds more than {MAX_VALUES} values")
    return b"".join(bare.split(b'"')[::2])


def _check_size(structure: bytes) -> None:
    """Before anything is built of it."""
    num_values = structure.count(b",") + structure.count(b"[") + structure.count(b"{")
    if num_values > MAX_VALUES:
        raise NotStrict(f"it holds more than {MAX_VALUES} values")
    if structure.count(b"[") + structure.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.findall(structure):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise NotStrict(f"lists and objects are more than {MAX_DEPTH} deep")


def _check(value: Any, *, has_large_numbers: bool) -> int:
    """How many keys its objects have. Without large numbers, only lists and objects are looked at."""
    num_keys = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if len(item) > MAX_KEYS:
                raise NotStrict(f"an object holds more than {MAX_KEYS} keys")
            num_keys += len(item)
            item = list(item.values())
        elif not isinstance(item, list):
            _check_number(item)
            continue
        waiting += item if has_large_numbers else [each for each in item if isinstance(each, (dict, list))]
    return num_keys


def _check_number(value: Any) -> None:
    is_too_large = (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER
    )
    if is_too_large:
        digits = str(value)
        shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
        raise NotStrict(f"{shown} is beyond a 64-bit number")


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
