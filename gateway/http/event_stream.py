"""EventStream: an HTTP response of server-sent events, whatever their content."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.whole_json import portions

PING_INTERVAL_S = 15.0
"""A stream gets a ping after this time without an event. Many proxies end a connection after a minute without a byte,
and Claude Code after five minutes; a long prompt in a long queue takes longer."""
Ping = Callable[[], bytes]
"""Makes the bytes of a ping, which consists of one event or of several."""


def blank_lines() -> bytes:
    """A ping that clients ignore. A comment would not do: the load generators of vLLM, SGLang and llmperf join it to
    the next event, or parse it as JSON, and count the request as failed."""
    return b"\n\n"


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx delays events
]


def event(name: str, data: bytes | Mapping[str, object]) -> bytes:
    """One event. `data`: JSON as bytes, or a mapping that is converted to JSON."""
    body = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
    return b"event: %s\ndata: %s\n\n" % (name.encode(), body)


class EventSender:
    """Sends the events of one response.

    The status is sent with the first write. So an error before the first write gets its own status.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = asyncio.Lock()
        self._is_between_events = True
        self._is_writing_pieces = False
        self._last_event_s = asyncio.get_running_loop().time()
        self.has_begun = False
        """True once the status is sent."""

    async def __call__(self, body: bytes) -> None:
        """Sends one event, several events together, or a part of one. Waits while the client reads too slowly."""
        async with self._sending:
            if not self.has_begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self.has_begun = True  # not earlier: a ping may be cancelled while it waits for the client
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if body:
            self._is_between_events = body.endswith(b"\n\n")
            self._last_event_s = asyncio.get_running_loop().time()

    async def send_pieces(self, pieces: Iterable[str]) -> None:
        """Sends whole events, whose pieces are ASCII, in large parts.

        No ping is sent between the first and the last piece: an event gets its number when its pieces are made, and a
        ping may need the next number.
        """
        self._is_writing_pieces = True
        try:
            async with aclosing(portions(pieces)) as each:
                async for portion in each:
                    await self(portion.encode("ascii"))
        finally:
            self._is_writing_pieces = False

    async def end(self) -> None:
        """Sends the end of the response. No write may follow."""
        if not self.has_begun:
            await self(b"")
        await self._send({"type": "http.response.body", "body": b""})

    async def keep_alive(self, ping: Ping) -> None:
        """Sends a ping after each PING_INTERVAL_S without an event, until this coroutine is cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._last_event_s + PING_INTERVAL_S - now()))
            if self._is_idle and now() >= self._last_event_s + PING_INTERVAL_S:
                await self(ping())
            elif not self._is_idle:
                self._last_event_s = now()

    @property
    def _is_idle(self) -> bool:
        """False while an event is only partly sent, or waits for the client to read."""
        is_writing = self._is_writing_pieces or self._sending.locked()
        return self._is_between_events and not is_writing


class EventStream(Response):
    """A response with everything that `produce` writes.

    An error before the first write gets its own status; a later error breaks off the stream. `produce` is cancelled
    when the client disconnects. If a client stops reading, the connection ends at a deadline (`BoundedH11`).
    """

    def __init__(self, produce: Callable[[EventSender], Awaitable[None]], ping: Ping | None = None) -> None:
        """`ping`: makes the bytes that the client gets while no event comes. None: the client then gets nothing."""
        super().__init__()
        self._produce = produce
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - an ASGI signature
        await while_connected(receive, self._run(EventSender(send)))

    async def _run(self, sender: EventSender) -> None:
        if self._ping is None:
            await self._produce(sender)
        else:
            await self._produce_with(self._ping, sender)
        await sender.end()

    async def _produce_with(self, ping: Ping, sender: EventSender) -> None:
        """Produces the events. When the stream has lasted for PING_INTERVAL_S, starts a task that sends pings. Most
        streams end earlier, and a timer costs less than a task."""
        pinging: list[asyncio.Task[None]] = []

        def begin() -> None:
            pinging.append(asyncio.create_task(sender.keep_alive(ping)))

        timer = asyncio.get_running_loop().call_later(PING_INTERVAL_S, begin)
        try:
            await self._produce(sender)
        finally:
            timer.cancel()
            for task in pinging:
                task.cancel()
                await asyncio.wait((task,))


def stream_of(events: AsyncGenerator[bytes, None]) -> EventStream:
    """Sends each event when `events` yields it. However the stream ends, the generator is closed."""

    async def produce(send: EventSender) -> None:
        async with aclosing(events):
            async for each in events:
                await send(each)

    return EventStream(produce)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end. If the client disconnects first, cancels `work` and waits until it has cleaned
    up.

    Call this function after the request's body has been read.
    """
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnecting.cancel()
        working.cancel()
        await asyncio.wait((working, disconnecting))
    if not working.cancelled():
        working.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
