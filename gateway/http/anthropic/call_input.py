"""The input of a call in a message that is not streamed: the JSON that the model wrote, or its complete part.

Libraries refuse deeply nested JSON, and change numbers beyond a double. This reader builds no values, so it accepts
any depth and any number.
"""

import re
from collections.abc import Iterator
from enum import Enum, auto

from gateway.http.whole_json import PIECE_CHARACTERS

TOKENS_PER_PIECE = 512
"""This many tokens of JSON usually take about a millisecond to read. A string is one token, however long it is."""

_TOKEN = re.compile(
    r"""[ \t\r\n]*+ (?= (.) ) (?:
        [{}\[\],:]
      | "(?: [^"\\\x00-\x1f]++ | \\["\\/bfnrt] | \\u[0-9a-fA-F]{4} )*+ "
      | (?: true | false | null | -? (?: 0 | [1-9][0-9]*+ ) (?: \.[0-9]++ )? (?: [eE][+-]?[0-9]++ )? ) (?! [\w.+-] )
    )""",
    re.VERBOSE | re.ASCII,
)
"""One token, and any spaces before it. Group 1 is the token's first character."""

_CLOSING = {"{": "}", "[": "]"}


class _Expected(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()
    """An item, or the end of the list or object."""
    KEY = auto()
    COLON = auto()
    AFTER_ITEM = auto()
    """A comma, or the end of the list or object."""


def input_pieces(arguments: str) -> Iterator[str]:
    """The input in pieces that are quick to make; some are empty. Joined, they are always a JSON object.

    If the arguments end too early, the input ends after the last complete value, as clients of a stream read it. A
    number at the end counts as complete. The input also ends after the last complete value if text follows that is no
    JSON. Only a model without a grammar writes such text.
    """
    closers: list[str] = []
    expected = _Expected.VALUE
    at = end = num_tokens = 0
    while (found := _TOKEN.match(arguments, at)) is not None:
        following = _after(found[1], expected, closers)
        if following is None:
            break
        expected, at = following, found.end()
        if expected in (_Expected.FIRST_ITEM, _Expected.AFTER_ITEM):
            end = at
            if not closers:
                break
        num_tokens += 1
        if num_tokens % TOKENS_PER_PIECE == 0:
            yield ""
    for begin in range(0, end, PIECE_CHARACTERS):
        yield arguments[begin : min(begin + PIECE_CHARACTERS, end)]
    yield "".join(reversed(closers)) if end else "{}"


def _after(first: str, expected: _Expected, closers: list[str]) -> _Expected | None:
    """What may follow the token that begins with `first`; None: the token is in a wrong place. Updates `closers`,
    the brackets that close the open lists and objects."""
    is_in_object = closers[-1:] == ["}"]
    if first in "]}":
        if expected not in (_Expected.FIRST_ITEM, _Expected.AFTER_ITEM) or closers[-1:] != [first]:
            return None
        closers.pop()
        return _Expected.AFTER_ITEM
    if first == ",":
        following = _Expected.KEY if is_in_object else _Expected.VALUE
        return following if expected is _Expected.AFTER_ITEM else None
    if first == ":":
        return _Expected.VALUE if expected is _Expected.COLON else None
    if expected is _Expected.KEY or (expected is _Expected.FIRST_ITEM and is_in_object):
        return _Expected.COLON if first == '"' else None
    if expected not in (_Expected.VALUE, _Expected.FIRST_ITEM) or (not closers and first != "{"):
        return None
    if first in _CLOSING:
        closers.append(_CLOSING[first])
        return _Expected.FIRST_ITEM
    return _Expected.AFTER_ITEM
