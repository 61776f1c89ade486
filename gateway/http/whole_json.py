"""Writes a JSON answer in pieces while it is sent, so that no single step blocks the event loop for long."""

import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing

from pydantic_core import to_json
from starlette.types import Send

from gateway.turn_budget import TurnBudget

PIECE_CHARACTERS = 16 * 1024
"""Size of a piece of a long text."""
WRITE_CHARACTERS = 256 * 1024
"""Size of one write, which takes a millisecond. A client must read each write within
`gateway.write_timeout_s`, so a slow client cannot keep an answer in memory for ever."""

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def json_string(text: str) -> str:
    """The text as a JSON string, with its quotes."""
    return to_json(text).decode()


ascii_json = json.JSONEncoder().encode
"""Writes a value as JSON in ASCII, like everything in a stream's events."""


def string_pieces(text: str) -> Iterator[str]:
    """The text as a JSON string without its quotes, in pieces."""
    for begin in range(0, len(text), PIECE_CHARACTERS):
        yield json_string(text[begin : begin + PIECE_CHARACTERS])[1:-1]


def in_ascii(text: str) -> str:
    """The same JSON in ASCII: other characters, which only strings contain, are escaped."""
    return text if text.isascii() else _NOT_ASCII.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


async def portions(pieces: Iterable[str]) -> AsyncGenerator[str, None]:
    """Joins pieces to portions. Only the last portion may have fewer than WRITE_CHARACTERS. Each piece must be quick to
    make: other tasks run in between."""
    budget = TurnBudget()
    waiting: list[str] = []
    num_waiting = 0
    for piece in pieces:
        waiting.append(piece)
        num_waiting += len(piece)
        await budget.pause_if_spent()
        if num_waiting >= WRITE_CHARACTERS:
            yield "".join(waiting)
            waiting, num_waiting = [], 0
    if waiting:
        yield "".join(waiting)


async def send_json(pieces: Iterable[str], send: Send) -> None:
    """Sends the pieces in portions. An answer of one portion has a content-length; a longer one is sent in chunks."""
    body, is_open = b"", False
    async with aclosing(portions(pieces)) as each:
        async for portion in each:
            if body:
                if not is_open:
                    await _start(send, [])
                    is_open = True
                await send({"type": "http.response.body", "body": body, "more_body": True})
            body = portion.encode()
    if not is_open:
        await _start(send, [(b"content-length", str(len(body)).encode())])
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [*headers, (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
