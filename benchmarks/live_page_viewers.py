"""Viewers of the live page that only read: `python -m benchmarks.live_page_viewers PORT NUMBER`, until it is ended."""

import asyncio
import sys


async def watch(port: int) -> None:
    """Reads snapshots as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /cluster/events HTTP/1.1\r\nHost: viewer\r\n\r\n")
    while await reader.read(2**16):
        pass


async def main(port: int, number: int) -> None:
    await asyncio.gather(*[watch(port) for _ in range(number)])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
