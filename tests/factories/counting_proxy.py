"""A TCP proxy between client and gateway that counts bytes, and can stop forwarding them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CountingProxy:
    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_connections = 0
        self.bytes_to_client = 0
        self.passes = asyncio.Event()
        """While this is clear, no byte is forwarded in either direction, and neither end is notified."""
        self.passes.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except ConnectionError:
            writer.close()
            return
        except asyncio.CancelledError:
            writer.close()
            raise
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, there_writer, counted=False))
                both.create_task(self._pass_on(there_reader, writer, counted=True))
        finally:
            writer.close()
            there_writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool
    ) -> None:
        try:
            while data := await reader.read(65536):
                await self.passes.wait()
                self.bytes_to_client += len(data) if counted else 0
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def proxy_to(port: int, host: str = "127.0.0.1", own_port: int = 0) -> AsyncIterator[CountingProxy]:
    """Listens at `host` and `own_port`; 0 means any free port."""
    proxy = CountingProxy(port)
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await proxy.serve(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            running.discard(task)

    server = await asyncio.start_server(accept, host, own_port)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
