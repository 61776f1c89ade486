"""LingeringTransport on its own: clients that have reset their connection."""

import asyncio
import socket
import struct
from typing import cast

from gateway.http.lingering_close import LingeringTransport


async def test_a_reset_that_was_not_read_yet_does_not_make_close_fail() -> None:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    async with (
        await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), "127.0.0.1", 0) as server,
        asyncio.timeout(60),
    ):
        client = socket.create_connection(server.sockets[0].getsockname())
        writer = await accepted.get()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # with a reset, in the same turn of the event loop
        connection = cast("asyncio.Transport", writer.transport)
        transport = LingeringTransport(connection, lambda: True, 60.0)
        transport.close()
        assert transport.is_closing()
        while not connection.is_closing():
            await asyncio.sleep(0.01)
