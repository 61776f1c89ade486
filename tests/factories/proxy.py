"""A TCP proxy before a server. A test may count its bytes, hold them, lose them, and break its connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Direction = Literal["to server", "to client"]


class Proxy:
    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.num_connections = 0
        self.bytes_to_client = 0
        self.passes = asyncio.Event()
        """While this is clear, no byte is forwarded in either direction, and neither end is notified."""
        self.passes.set()
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
        self.num_connections += 1
        if self.is_cut:
            writer.transport.abort()
            return
        self._writers.add(writer)  # `cut` breaks it even while the other end is connecting
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except ConnectionError:
            writer.close()
            return
        if writer not in self._writers:
            there_writer.transport.abort()
            return
        self._writers.add(there_writer)
        await asyncio.gather(
            self._pass_on(reader, there_writer, "to server"), self._pass_on(there_reader, writer, "to client")
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        try:
            while data := await reader.read(65536):
                await self.passes.wait()
                if self.swallows == direction:
                    self.num_swallowed += 1
                    continue
                self.bytes_to_client += len(data) if direction == "to client" else 0
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def proxy_to(port: int, host: str = "127.0.0.1", own_port: int = 0) -> AsyncIterator[Proxy]:
    """Listens at `host` and `own_port`; 0 means any free port."""
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy.accept, host, own_port)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.passes.set()
        proxy.cut()
