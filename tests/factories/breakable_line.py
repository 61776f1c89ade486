"""A TCP connection that a test may break: what goes through it arrives, or is lost, and then it comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Direction = Literal["to worker", "to gateway"]


class BreakableLine:
    """Listens at `address` and carries bytes to and from the address behind it."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""
        self.is_cut = False
        """While it is set, no connection is accepted."""
        self.swallows: Direction | None = None
        """What goes this way is taken and lost; the sender does not notice."""
        self.num_swallowed = 0

    def cut(self) -> None:
        """Every connection breaks; what was swallowed before does not come again."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        """Connections are possible again, and carry everything."""
        self.is_cut, self.swallows = False, None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Of the listening socket."""
        if self.is_cut:
            writer.transport.abort()
            return
        self._writers.add(writer)  # `cut` breaks it also while the other end is being reached
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
            pass  # it was cut
        target.transport.abort()


@asynccontextmanager
async def breakable_line(address: str) -> AsyncIterator[BreakableLine]:
    """A line to the listener at `address`, of ZeroMQ's form."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    line = BreakableLine(host, int(port))
    server = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    line.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.cut()
