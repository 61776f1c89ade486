"""Connections without a request: how long they stay open, and that they keep no caller with a key out."""

import asyncio
import socket
from collections.abc import Sequence
from http.client import HTTPResponse
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from baton.clock import SystemClock
from gateway.auth.authenticator import Authenticator
from gateway.auth.callers import ANYBODY, Caller
from gateway.grpc import server
from gateway.http import protocol
from gateway.http.server import HttpServer
from tests.factories.api_keys import ALICE, API_KEYS, AS_ADMIN, BOB
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with, outputs_of, silent
from tests.factories.strangers import is_closed, strangers

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
COMPLETION = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
GRPC_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04" + b"\x00" * 5


def caller(under_test: GatewayUnderTest, key: str) -> httpx2.AsyncClient:
    return under_test.http(headers={"authorization": f"Bearer {key}"})


def read_answer(reader: socket.socket) -> bytes:
    with HTTPResponse(reader) as response:
        response.begin()
        return response.read()


@pytest.mark.parametrize("say", [b"", HEALTH, HEALTH[:20]])
async def test_over_http_strangers_displace_each_other_and_no_caller(folder: Path, say: bytes) -> None:
    async with (
        gateway_with(
            folder, {}, {"d0": answering([7, 8])}, max_connections=8, api_keys=API_KEYS, credentials=AS_ADMIN
        ) as under_test,
        caller(under_test, ALICE) as early,
        caller(under_test, BOB) as late,
    ):
        assert (await early.get("/v1/models")).status_code == 200
        assert under_test.gateway._http is not None
        (kept,) = under_test.gateway._http._server._connections
        with strangers(under_test.gateway.http_port, 40, say) as opened:
            await under_test.until(lambda: sum(map(is_closed, opened)) >= 33)
            assert (await late.post("/v1/completions", json=COMPLETION)).status_code == 200
            assert (await early.post("/v1/completions", json=COMPLETION)).status_code == 200
            assert kept in under_test.gateway._http._server._connections, "it was not displaced"


async def test_c57_one_callers_streams_leave_http_connections_to_others(folder: Path) -> None:
    async with (
        gateway_with(
            folder, {}, {"d0": silent}, max_connections=4, api_keys=API_KEYS, credentials=AS_ADMIN
        ) as under_test,
        caller(under_test, ALICE) as greedy,
        caller(under_test, BOB) as other,
    ):
        worker = under_test.workers["d0"]
        running = [asyncio.create_task(greedy.post("/v1/completions", json=COMPLETION)) for _ in range(3)]
        requests = [await worker.next_request() for _ in running]
        refused = await greedy.post("/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "run on 3 of 4 connections" in refused.json()["error"]["message"]
        running.append(asyncio.create_task(other.post("/v1/completions", json=COMPLETION)))
        requests.append(await worker.next_request())
        for request in requests:
            worker.say(request, outputs_of(request, [7, 8]))
        assert [(await each).status_code for each in running] == [200] * 4


@pytest.mark.parametrize("num_bytes", [60_000, 3_000_000])
async def test_an_answer_that_its_client_has_yet_to_read_is_not_displaced(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds a part of it, the gateway the rest."""
    monkeypatch.setattr("gateway.http.server.SEND_BUFFER_BYTES", 4096)

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        scope["state"][protocol.ON_CALLER](ANYBODY)
        length = [(b"content-length", str(num_bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"x" * num_bytes})

    refusals: list[str] = []
    http_server = HttpServer(
        app,
        "127.0.0.1",
        0,
        SystemClock(),
        max_connections=1,
        write_timeout_s=60.0,
        on_refused=refusals.append,
    )
    await http_server.start()
    try:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(60.0)
            slow.connect(("127.0.0.1", http_server.port))
            slow.sendall(HEALTH)
            async with asyncio.timeout(60):
                while not any(connection.cycle for connection in http_server._server._connections):
                    await asyncio.sleep(0.01)
            with strangers(http_server.port, 1, b"") as (other,):
                assert b"503" in await asyncio.to_thread(other.recv, 100)
            assert len(await asyncio.to_thread(read_answer, slow)) == num_bytes
            with strangers(http_server.port, 1, HEALTH) as (other,):
                assert b"200" in await asyncio.to_thread(other.recv, 100), "it had its answer"
    finally:
        await http_server.stop(0.0)


async def test_over_http_a_request_whose_caller_is_being_looked_up_keeps_its_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed file of keys is read meanwhile."""
    look_up, found, is_waiting = Authenticator.caller_of, asyncio.Event(), asyncio.Event()

    async def caller_of(self: Authenticator, authorizations: Sequence[str]) -> Caller:
        is_waiting.set()
        await found.wait()
        return await look_up(self, authorizations)

    monkeypatch.setattr(Authenticator, "caller_of", caller_of)
    async with (
        gateway_with(
            folder, {}, {}, max_connections=1, api_keys=API_KEYS, credentials=AS_ADMIN
        ) as under_test,
        caller(under_test, ALICE) as alice,
    ):
        answer = asyncio.create_task(alice.get("/v1/models"))
        await is_waiting.wait()
        with strangers(under_test.gateway.http_port, 1, b"") as (stranger,):
            assert b"503" in await asyncio.to_thread(stranger.recv, 100)
        found.set()
        assert (await answer).status_code == 200


async def test_over_http_strangers_that_read_no_refusal_keep_no_caller_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.server.SEND_BUFFER_BYTES", 4096)
    async with (
        gateway_with(
            folder, {}, {}, max_connections=2, api_keys=API_KEYS, credentials=AS_ADMIN
        ) as under_test,
        caller(under_test, ALICE) as alice,
    ):
        http_server, port = under_test.gateway._http, under_test.gateway.http_port
        assert http_server is not None
        with socket.socket() as first, socket.socket() as second:
            for stranger in (first, second):
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stranger.connect(("127.0.0.1", port))
                stranger.sendall(HEALTH.replace(b"/health", b"/v1/models") * 500)
            await under_test.until(
                lambda: sum(each.flow.write_paused for each in http_server._server._connections) == 2
            )
            assert (await alice.get("/v1/models")).status_code == 200


async def test_over_http_a_stranger_has_less_time_between_requests_than_a_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert protocol.STRANGER_KEEP_ALIVE_S < protocol.KEEP_ALIVE_S
    monkeypatch.setattr(protocol, "STRANGER_KEEP_ALIVE_S", 0.2)
    async with (
        gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test,
        caller(under_test, ALICE) as alice,
    ):
        assert (await alice.get("/v1/models")).status_code == 200
        assert under_test.gateway._http is not None
        connections = under_test.gateway._http._server.server_state.connections
        (kept,) = connections
        with strangers(under_test.gateway.http_port, 3, HEALTH) as opened:
            await under_test.until(lambda: all(map(is_closed, opened)))
        assert connections == {kept}


async def test_over_grpc_a_connection_without_calls_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTION_IDLE_S", 1.0)
    async with gateway_with(folder, {}, {"d0": silent}, max_connections=4) as under_test:
        running = asyncio.ensure_future(anext(under_test.client.generate(text="Hi")))
        request = await under_test.workers["d0"].next_request()
        with strangers(under_test.gateway.grpc_port, 3, GRPC_PREFACE) as opened:
            await under_test.until(lambda: all(map(is_closed, opened)))
        under_test.workers["d0"].say(request, outputs_of(request, [7, 8]))
        assert (await running).token_ids, "a connection with a call stays"
