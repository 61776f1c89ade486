"""Clients that stop reading, vanish or cancel, many at once: the gateway forgets them, and frees all that they
held."""

import asyncio
import json
import socket
from pathlib import Path

from tests.clients.swarm import held_by, script, swarm
from tests.factories.gateway import GatewayUnderTest, gateway_with, silent

BODY = json.dumps({"model": "tiny", "prompt": [5, 6], "max_tokens": 2}).encode()
COMPLETION = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def num_connections(under_test: GatewayUnderTest) -> int:
    assert under_test.gateway._http is not None
    return len(under_test.gateway._http._server.server_state.connections)


def connect(port: int | None, received_bytes: int = 4096) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    connection.settimeout(60.0)
    connection.connect(("127.0.0.1", port))
    return connection


async def test_a_swarm_of_bad_clients_leaves_nothing_behind(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": script}, write_timeout_s=0.5) as under_test:
        await swarm(under_test, 10)  # makes objects that a process makes only once
        before = await held_by(under_test)
        await swarm(under_test, 50)
        # Some tasks live only for a moment, such as that of a heartbeat.
        await under_test.until(lambda: len(asyncio.all_tasks()) <= before.num_tasks)
        after = await held_by(under_test)
        assert (after.num_runs, after.num_sub_requests) == (0, 0)
        assert after.num_files <= before.num_files
        assert after.rss_mib <= before.rss_mib + 30.0
        counters = under_test.dispatcher.tally.counters
        assert counters["received"] == 180
        assert counters["aborted"] >= 120, "clients that vanish or cancel"


async def test_a_client_that_reads_nothing_over_http_loses_its_connection(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}, write_timeout_s=0.5) as under_test:
        with connect(under_test.gateway.http_port) as connection:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400)
            await under_test.until(lambda: num_connections(under_test) == 1)
            await under_test.until(lambda: num_connections(under_test) == 0)


async def test_one_connection_too_many_is_refused_at_either_frontend(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}, max_connections=2) as under_test:
        port = under_test.gateway.http_port
        first, second = connect(port), connect(port)
        for busy in (first, second):
            busy.sendall(COMPLETION)
            await under_test.workers["w0"].next_request()
        with connect(port) as third:
            answer = await asyncio.to_thread(read_all, third)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"\r\nretry-after: 1\r\n" in head
            assert json.loads(body)["error"]["message"] == "2 connections are open, which is the limit"
        first.close()
        await under_test.until(lambda: num_connections(under_test) == 1)
        with connect(port) as fourth:
            fourth.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await asyncio.to_thread(read_all, fourth)).startswith(b"HTTP/1.1 200")
        second.close()
        await under_test.client.describe()  # one of the two over gRPC
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        with (
            connect(under_test.gateway.grpc_port) as other,
            connect(under_test.gateway.grpc_port) as more,
        ):
            other.sendall(preface)
            assert await asyncio.to_thread(other.recv, 100)
            assert await asyncio.to_thread(read_all, more) == b""


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)
