"""EventStream: server-sent events that end with their reader, errors before the first of them, and pings."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from itertools import count

import pytest
from starlette.types import Message

from baton.errors import Overloaded
from gateway.http import event_stream
from gateway.http.event_stream import PING_INTERVAL_S, EventSender, EventStream, event, stream_of
from tests.factories.virtual_loop import in_virtual_time


def comment() -> bytes:
    """A ping that no event contains."""
    return b": ping\n\n"


class Reader:
    """A client. When `leaves` is set, the client has left."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.times: list[float] = []
        self.leaves = asyncio.Event()
        self.reads = asyncio.Event()
        """While this is clear, the client reads nothing."""
        self.reads.set()

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.messages.append(message)
        self.times.append(asyncio.get_running_loop().time())

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def ping_times(self) -> list[float]:
        """When pings came, in intervals."""
        pairs = zip(self.messages, self.times, strict=True)
        return [round(at / PING_INTERVAL_S, 3) for message, at in pairs if message.get("body") == comment()]

    async def get(self, stream: EventStream) -> None:
        await stream({"type": "http", "path": "/events"}, self.receive, self.send)


class Source:
    """Three events, then nothing for ever unless it is to end."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends
        self.is_closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(3):
                yield event("tick", {"number": number})
            if not self._ends:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_events_go_out_as_browsers_read_them() -> None:
    reader = Reader()
    await reader.get(stream_of(Source(ends=True).events()))
    start = reader.messages[0]
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (
        200,
        b"text/event-stream; charset=utf-8",
    )
    assert reader.body.startswith(b'event: tick\ndata: {"number":0}\n\nevent: tick\n')
    assert not reader.messages[-1].get("more_body", False)


async def test_an_error_in_place_of_the_first_event_is_raised_before_anything_was_said() -> None:
    async def full() -> AsyncGenerator[bytes, None]:
        if not Reader().messages:
            raise Overloaded("full", retry_after_s=1.0)
        yield b""

    reader = Reader()
    with pytest.raises(Overloaded):
        await reader.get(stream_of(full()))
    assert reader.messages == []


async def test_a_client_that_leaves_ends_the_source_at_once() -> None:
    reader, source = Reader(), Source(ends=False)
    serving = asyncio.create_task(reader.get(stream_of(source.events())))
    async with asyncio.timeout(60):
        while not reader.messages:
            await asyncio.sleep(0)
        assert not source.is_closed
        reader.leaves.set()
        await serving
    assert source.is_closed


async def intervals(number: float) -> None:
    await asyncio.sleep(number * PING_INTERVAL_S)


@in_virtual_time
async def test_a_ping_comes_after_each_interval_without_an_event() -> None:
    async def produce(send: EventSender) -> None:
        await intervals(2.5)
        assert send.has_begun
        await send(b"data: 1\n\n")
        await intervals(0.9)
        await send(b"data: 2\n\n")
        await send(b"")  # is no event
        await intervals(1.2)

    reader = Reader()
    await reader.get(EventStream(produce, comment))
    assert reader.ping_times == [1.0, 2.0, 4.4]
    assert reader.body.replace(comment(), b"") == b"data: 1\n\ndata: 2\n\n"


@in_virtual_time
async def test_no_ping_comes_within_an_event_or_before_a_slow_reader() -> None:
    async def produce(send: EventSender) -> None:
        await send(b"data: a large")
        await intervals(3.5)
        await send(b" one\n\n")
        reader.reads.clear()
        asyncio.get_running_loop().call_later(3 * PING_INTERVAL_S, reader.reads.set)
        await send(b"data: 2\n\n")
        await intervals(0.5)

    reader = Reader()
    await reader.get(EventStream(produce, comment))
    assert reader.body == b"data: a large one\n\ndata: 2\n\n"


@in_virtual_time
async def test_an_event_waits_for_the_ping_before_it() -> None:
    async def produce(send: EventSender) -> None:
        asyncio.get_running_loop().call_later(2 * PING_INTERVAL_S, reader.reads.set)
        await intervals(1.5)
        await send(b"data: 1\n\n")

    reader = Reader()
    reader.reads.clear()
    await reader.get(EventStream(produce, comment))
    assert [message["type"] for message in reader.messages].count("http.response.start") == 1
    assert reader.body == comment() + b"data: 1\n\n"


async def test_no_ping_comes_while_the_pieces_of_events_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and pings share their numbers."""
    numbers = count()

    def numbered() -> bytes:
        return b"%d " % next(numbers)

    def pieces() -> Iterator[str]:
        for _ in range(10):
            yield numbered().decode()
            time.sleep(0.005)  # so other tasks run before the next piece

    async def produce(send: EventSender) -> None:
        await send.send_pieces(pieces())
        reader.leaves.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(event_stream, "PING_INTERVAL_S", 0.001)
    reader = Reader()
    await reader.get(EventStream(produce, numbered))
    assert [int(number) for number in reader.body.split()] == list(range(10))


@pytest.mark.parametrize(("number", "is_read"), [(0.9, True), (1.5, False)], ids=["before", "cannot go out"])
@in_virtual_time
async def test_an_error_before_the_first_ping_has_gone_out_has_its_own_status(
    number: float, is_read: bool
) -> None:
    async def produce(send: EventSender) -> None:
        await intervals(number)
        assert not send.has_begun
        raise Overloaded("full", retry_after_s=1.0)

    reader = Reader()
    if not is_read:
        reader.reads.clear()
    with pytest.raises(Overloaded):
        await reader.get(EventStream(produce, comment))
    assert reader.messages == []
