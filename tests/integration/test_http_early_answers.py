"""Answers that come before the end of the request: clients get them, although they are still sending."""

import asyncio
import http.client
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.system.tasks import end_tasks
from tests.factories.api_keys import API_KEYS, AS_ADMIN
from tests.factories.gateway import gateway_with, silent

HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MUCH = b"x" * 8 * 2**20
"""More than the kernel's buffers hold."""


def status_of(port: int) -> int:
    """The status that Python's own client gets. It reads nothing until it has sent everything. urllib always
    asks the server to close the connection."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request("POST", "/tokenize", MUCH, {"content-type": "application/json", "connection": "close"})
        with client.getresponse() as answer:
            answer.read()
            return answer.status


@pytest.mark.parametrize(
    ("status", "config"), [(401, {"api_keys": API_KEYS, "credentials": AS_ADMIN}), (413, {})]
)
async def test_a_client_that_sends_its_whole_body_first_gets_the_refusal(
    folder: Path, status: int, config: dict[str, Any]
) -> None:
    async with gateway_with(folder, {}, {}, max_message_mib=1, **config) as under_test:
        assert under_test.gateway.http_port is not None
        for _ in range(3):
            assert await asyncio.to_thread(status_of, under_test.gateway.http_port) == status


async def test_each_client_of_a_burst_beyond_the_limit_of_connections_is_told_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.acceptor.REFUSAL_TIMEOUT_S", 60.0)
    async with gateway_with(folder, {}, {"d0": silent}, max_connections=2) as under_test:
        assert under_test.gateway.http_port is not None
        async with under_test.http() as client:
            body = {"model": "tiny", "prompt": "x"}
            running = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
            await under_test.until(lambda: under_test.dispatcher.num_in_flight == 2)
            with ThreadPoolExecutor(40) as threads:
                refuse = partial(
                    asyncio.get_running_loop().run_in_executor,
                    threads,
                    status_of,
                    under_test.gateway.http_port,
                )
                assert set(await asyncio.gather(*[refuse() for _ in range(40)])) == {503}
            await end_tasks(*running)
        await under_test.until(lambda: not under_test.dispatcher.num_in_flight)


MALFORMED = {
    "a chunk without a size": (400, HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + MUCH),
    "headers without an end": (431, HEAD + b"x: y\r\n" * 500_000),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_client_that_sends_much_that_is_malformed_gets_the_error_and_its_end(
    folder: Path, name: str
) -> None:
    status, data = MALFORMED[name]
    async with gateway_with(folder, {}, {}) as under_test, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
        writer.write(data)
        await writer.drain()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.endswith(b"}")
        writer.close()


async def send_forever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_a_client_that_never_stops_sending_is_cut_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.protocol.REQUEST_TIMEOUT_S", 0.5)
    async with gateway_with(folder, {}, {}) as under_test, asyncio.timeout(60):
        _, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
        writer.write(b"no HTTP\r\n\r\n")
        with pytest.raises(ConnectionError):
            await send_forever(writer)


@pytest.mark.parametrize(
    ("status", "rest"),
    [(413, b"content-length: 90000000\r\n\r\n"), (400, b"transfer-encoding: chunked\r\n\r\nzz\r\n")],
)
async def test_a_stop_does_not_wait_for_the_rest_of_an_answered_request(
    status: int, rest: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.protocol.REQUEST_TIMEOUT_S", 600.0)
    async with gateway_with(folder, {}, {}, max_message_mib=1) as under_test, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
        writer.write(HEAD + rest)
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
        await under_test.gateway.stop(grace_s=600.0)
        writer.close()
