"""EventStream: an HTTP response of server-sent events, whatever their content."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Write = Callable[[bytes], Awaitable[None]]
"""Sends one event, or several together. Waits while the client reads too slowly."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx delays events
]


def event(name: str, data: bytes | Mapping[str, object]) -> bytes:
    """One event. `data`: JSON as bytes, or a mapping that is converted to JSON."""
    body = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
    return b"event: %s\ndata: %s\n\n" % (name.encode(), body)


class EventStream(Response):
    """A response with everything that `produce` writes.

    The status is sent with the first write. So an error before the first write gets its own status; a later
    error breaks off the stream. `produce` is cancelled when the client disconnects. If a client stops
    reading, the connection ends at a deadline (`BoundedH11`).
    """

    def __init__(self, produce: Callable[[Write], Awaitable[None]]) -> None:
        super().__init__()
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - an ASGI signature
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        is_open = False

        async def write(body: bytes) -> None:
            nonlocal is_open
            if not is_open:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                is_open = True
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await self._produce(write)
        if not is_open:
            await write(b"")
        await send({"type": "http.response.body", "body": b""})


def stream_of(events: AsyncGenerator[bytes, None]) -> EventStream:
    """Sends each event when `events` yields it. However the stream ends, the generator is closed."""

    async def produce(write: Write) -> None:
        async with aclosing(events):
            async for each in events:
                await write(each)

    return EventStream(produce)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end. If the client disconnects first, cancels `work` and waits until it has cleaned
    up.

    Call this function after the request's body has been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
