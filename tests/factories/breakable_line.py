"""A TCP connection that a test may break. Its bytes arrive or are lost, and the test may restore it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Direction = Literal["to worker", "to gateway"]


class BreakableLine:
    """Listens at `address`, and carries bytes to and from the target address."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""
        self.is_cut = False
        """While this is set, no connection is accepted."""
        self.swallows: Direction | None = None
        """Bytes in this direction are read and lost. The sender does not notice."""
        self.num_swallowed = 0

    def cut(self) -> None:
        """Breaks every connection. Bytes that were swallowed before do not arrive later."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        """Allows connections again. They carry everything."""
        self.is_cut, self.swallows = False, None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The listening socket calls this for each connection."""
        if self.is_cut:
            writer.transport.abort()
            return
        self._writers.add(writer)  # `cut` breaks it even while the other end is connecting
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        if writer not in self._writers:
            far_writer.transport.abort()
            return
        self._writers.add(far_writer)
        ways: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, Direction]] = [
            (reader, far_writer, "to worker"),
            (far_reader, writer, "to gateway"),
        ]
        for source, target, direction in ways:
            pump = asyncio.create_task(self._pump(source, target, direction))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: Direction
    ) -> None:
        try:
            while data := await source.read(65536):
                if self.swallows == direction:
                    self.num_swallowed += 1
                else:
                    target.write(data)
        except OSError:
            pass  # the line was cut
        target.transport.abort()


@asynccontextmanager
async def breakable_line(address: str) -> AsyncIterator[BreakableLine]:
    """A line to the listener at `address`, an address in ZeroMQ's form."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    line = BreakableLine(host, int(port))
    server = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    line.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.cut()
