"""A stopping gateway as its clients see it; neither that nor malformed input is logged."""

import asyncio
import json
import logging
import socket
from collections.abc import Coroutine
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from gateway.client import GatewayError
from tests.factories.gateway import GatewayUnderTest, answering, beginning, gateway_with, outputs_of, silent
from tests.factories.strangers import strangers

STOPS = "this gateway is shutting down; use another one, or try again later"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [5, 6, 7], **fields}


def read_answer(client: socket.socket) -> tuple[HTTPResponse, bytes]:
    with HTTPResponse(client) as response:
        response.begin()
        return response, response.read()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines of the HTTP side. The scripted workers also log the gateway's end; these lines are left out."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and not record.name.startswith("worker")
    ]


def test_running_requests_may_end_and_an_idle_connection_delays_no_shutdown(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test, under_test.http() as client:
            assert (await client.get("/health")).status_code == 200, "on a connection that stays"
            asking = asyncio.create_task(client.post("/v1/completions", json=completion()))
            request = await under_test.workers["d0"].next_request()
            stopping = asyncio.create_task(under_test.gateway.stop(grace_s=30.0))
            await under_test.until(lambda: under_test.gateway._http is not None and not listens(under_test))
            under_test.workers["d0"].say(request, outputs_of(request, [8, 9]))
            assert (await asking).status_code == 200
            await stopping

    run(test())
    assert complaints(caplog) == []


def test_requests_that_were_sent_before_a_client_knows_of_the_stop_are_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy has just sent one request on an open connection, and another on a connection that is not accepted yet.
    The proxy sends no further request on these connections, since the answers close them."""
    monkeypatch.setattr("gateway.http.server.LAST_REQUESTS_S", 60.0)
    body = json.dumps(completion(max_tokens=2)).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    question = b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body

    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": answering([8, 9])}) as under_test:
            gateway = under_test.gateway
            assert gateway._http is not None
            with strangers(gateway.http_port, 1, question) as clients:
                first, _ = await asyncio.to_thread(read_answer, clients[0])
                assert (first.status, first.getheader("connection")) == (200, None)
                shutdown = gateway._http._server.shutdown

                async def shutdown_after_requests(sockets: list[socket.socket] | None = None) -> None:
                    clients.append(socket.create_connection(("127.0.0.1", gateway.http_port), timeout=60.0))
                    for client in clients:
                        client.sendall(question)
                    await shutdown(sockets)

                monkeypatch.setattr(gateway._http._server, "shutdown", shutdown_after_requests)
                stopping = asyncio.create_task(gateway.stop(grace_s=60.0))
                await under_test.until(lambda: len(clients) == 2)
                for client in clients:
                    last, answer = await asyncio.to_thread(read_answer, client)
                    assert (last.status, last.getheader("connection")) == (200, "close"), answer
                clients[1].close()
                await stopping

    run(test())


def test_a_stopping_gateway_is_not_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.server.LAST_REQUESTS_S", 60.0)

    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test, under_test.http() as client:
            assert (await client.get("/ready")).status_code == 200
            stopping = asyncio.create_task(under_test.gateway.stop(grace_s=60.0))
            await under_test.until(lambda: not listens(under_test))
            refused = await client.get("/ready")
            assert (refused.status_code, refused.json()["reason"]) == (503, "this gateway is stopping")
            await stopping

    run(test())


def listens(under_test: GatewayUnderTest) -> bool:
    assert under_test.gateway._http is not None
    return under_test.gateway._http._server.acceptor._listener is not None


one_token = beginning([5])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_requests_that_do_not_end_in_time_get_an_error(
    folder: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """The error has the form of the request's API: a status if no answer had begun, else the last event."""
    question = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
    if path == "/v1/completions":
        question = completion()
    elif path == "/v1/responses":
        question = {"model": "tiny", "input": "Hello", "store": False}

    async def test() -> None:
        workers: dict[str, Any] = {"d0": one_token}
        async with gateway_with(folder, {}, workers) as under_test, under_test.http() as client:
            asking = asyncio.create_task(client.post(path, json=question))
            await under_test.workers["d0"].next_request()
            async with client.stream("POST", path, json=question | {"stream": True}) as answer:
                events = answer.aiter_lines()
                await anext(events)
                await under_test.workers["d0"].next_request()
                await under_test.gateway.stop(grace_s=0.0)
                assert STOPS in "".join([event async for event in events])
            refused = await asking
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["message"] == STOPS
            assert under_test.dispatcher.num_in_flight == 0

    with caplog.at_level(logging.INFO, "gateway.telemetry.access_log"):
        run(test())
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("access_log")]
    assert len(lines) == 2
    assert all("outcome=failed error=GatewayStopping" in line for line in lines), lines
    assert complaints(caplog) == []


def test_grpc_calls_that_do_not_end_in_time_get_a_status_that_says_why(folder: Path) -> None:
    async def test() -> None:
        workers: dict[str, Any] = {"d0": one_token}
        async with gateway_with(folder, {}, workers) as under_test:
            events = under_test.client.generate(text="Hello", sampling={"max_tokens": 9})
            await anext(events)
            stopping = asyncio.create_task(under_test.gateway.stop(grace_s=0.0))
            with pytest.raises(GatewayError) as caught:
                _ = [event async for event in events]
            await stopping
            assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", STOPS)
            assert caught.value.details.reason == "GATEWAY_STOPPING"

    run(test())


def test_nobody_can_fill_the_log_with_what_cannot_be_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def asked(under_test: GatewayUnderTest, head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
        writer.write(head + b"host: localhost\r\nconnection: close, upgrade\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def test() -> None:
        async with gateway_with(folder, {}, {}) as under_test:
            assert b" 400 " in await asked(under_test, b"\x16\x03\x01\x02\r\n")
            assert b" 200 " in await asked(under_test, b"GET /health HTTP/1.1\r\nupgrade: websocket\r\n")
            assert b" 200 " in await asked(under_test, b"GET /health HTTP/1.1\r\nupgrade: h2c\r\n")

    run(test())
    assert complaints(caplog) == []
