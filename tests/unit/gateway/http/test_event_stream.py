"""EventStream: server-sent events that end with their reader, and errors before the first of them."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from baton.errors import Overloaded
from gateway.http.event_stream import EventStream, event, stream_of


class Reader:
    """A client. Once `leaves` is set, it is gone."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.leaves = asyncio.Event()

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

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
    await asyncio.sleep(0.01)
    assert not source.is_closed
    reader.leaves.set()
    async with asyncio.timeout(60):
        await serving
    assert source.is_closed
