"""The pages behind a reverse proxy that puts a prefix before all paths, in a real browser."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.factories.browser import browser, find_browser
from tests.factories.gateway import answering, gateway_with

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium is installed: apt install chromium"
)

PREFIX = b"/ml/baton"


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def reverse_proxy(port: int) -> AsyncIterator[str]:
    """The URL below which everything is passed on, without the prefix, to this port. Each connection has one
    request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, _, rest = (await reader.readuntil(b"\r\n")).partition(b" ")
        if not rest.startswith(PREFIX):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
            return
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", port)
        head = await reader.readuntil(b"\r\n\r\n")
        upstream.write(method + b" " + rest.removeprefix(PREFIX) + b"connection: close\r\n" + head)
        await asyncio.gather(pipe(reader, upstream), pipe(upstream_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{PREFIX.decode()}"
    finally:
        server.close()


async def test_the_live_page_and_the_description_work_below_a_prefix(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": answering([7, 8])}) as under_test, browser() as running:
        assert under_test.gateway.http_port is not None
        async with reverse_proxy(under_test.gateway.http_port) as url:
            page = await running.open(f"{url}/")
            await page.until("document.querySelector('#connection').innerText === '● live'")
            await page.evaluate("document.querySelector('[name=max_tokens]').value = 2")
            await page.evaluate("document.querySelector('#prompt').focus()")
            await page.type("Hello")
            await page.press("Enter", 13, modifiers=2)
            await page.until("document.querySelector('#summary').innerText.includes('ended by length')")
            assert page.complaints == []

            page = await running.open(f"{url}/docs")
            for button in (".opblock-summary-control", ".try-out__btn", ".execute"):
                await page.until(f"document.querySelector('{button}')")
                await page.evaluate(f"document.querySelector('{button}').click()")
            await page.until(f"document.querySelector('.request-url pre')?.innerText === '{url}/health'")
            await page.until(
                "document.querySelector('.live-responses-table .response')?.innerText.includes('200')"
            )
            assert page.complaints == []
