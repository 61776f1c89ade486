"""Connections whose TLS handshake is never completed: they count, they end, and they displace only each other."""

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from baton.config import Tls
from gateway import GatewayClient
from gateway.http import acceptor
from gateway.http.acceptor import Acceptor
from tests.factories.certificates import CertificateFiles
from tests.factories.gateway import GatewayUnderTest, gateway_with, outputs_of, silent
from tests.factories.strangers import is_closed, strangers

ROOT = Path(__file__).resolve().parents[2]


def acceptor_of(under_test: GatewayUnderTest) -> Acceptor:
    assert under_test.gateway._http is not None
    return under_test.gateway._http._server.acceptor


def num_connections(under_test: GatewayUnderTest) -> int:
    return len(acceptor_of(under_test)._places)


def https(port: int | None, files: CertificateFiles) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"https://localhost:{port}", verify=files.trusting(), timeout=60.0)


async def test_half_open_connections_count_and_displace_only_each_other(
    folder: Path, files: CertificateFiles
) -> None:
    async with gateway_with(
        folder, {}, {}, max_connections=4, tls=Tls(**files.tls()), credentials=files.credentials()
    ) as under_test:
        port = under_test.gateway.http_port
        async with https(port, files) as early, https(port, files) as late:
            assert (await early.get("/v1/models")).status_code == 200
            with strangers(port, 40) as idle:
                await under_test.until(lambda: sum(map(is_closed, idle)) >= 37)
                assert num_connections(under_test) == 4
                assert [is_closed(each) for each in idle] == [True] * 37 + [False] * 3
                assert (await early.get("/health")).status_code == 200
                assert (await late.get("/health")).status_code == 200
                assert (await under_test.client.model_info())["model"] == "tiny"
                assert sum(map(is_closed, idle)) == 38, "the one that came made room for itself"
                metrics = (await late.get("/metrics")).text
                assert 'error="TooManyConnections"} 38.0' in metrics
        await under_test.until(lambda: num_connections(under_test) == 0)


async def test_a_handshake_has_its_time(
    folder: Path, files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert acceptor.HANDSHAKE_TIMEOUT_S == 10.0
    monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT_S", 0.2)

    async with gateway_with(
        folder, {}, {}, tls=Tls(**files.tls()), credentials=files.credentials()
    ) as under_test:
        with strangers(under_test.gateway.http_port, 3) as silent:
            await under_test.until(lambda: all(map(is_closed, silent)))
            await under_test.until(lambda: num_connections(under_test) == 0)


async def test_at_the_limit_the_oldest_refused_connection_gives_way_to_the_next(
    folder: Path, files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_REFUSALS", 1)
    monkeypatch.setattr(acceptor, "REFUSAL_TIMEOUT_S", 60.0)

    def refused(port: int | None) -> ssl.SSLSocket:
        connection = socket.create_connection(("127.0.0.1", port), timeout=60.0)
        connection = files.trusting().wrap_socket(connection, server_hostname="localhost")
        assert connection.recv(1000).startswith(b"HTTP/1.1 503 ")
        return connection

    def is_cut_off(connection: ssl.SSLSocket) -> bool:
        with suppress(ConnectionError):
            return not connection.recv(1000)
        return True

    tls = Tls(**files.tls())
    async with gateway_with(
        folder, {}, {"w0": silent}, max_connections=1, tls=tls, credentials=files.credentials()
    ) as under_test:
        port = under_test.gateway.http_port
        async with https(port, files) as only:
            asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
            waiting = asyncio.create_task(only.post("/v1/completions", json=asked))
            request = await under_test.workers["w0"].next_request()
            with await asyncio.to_thread(refused, port) as first, strangers(port, 1) as (silent_one,):
                assert await asyncio.to_thread(is_cut_off, first)
                with await asyncio.to_thread(refused, port):
                    await under_test.until(lambda: is_closed(silent_one))
                    assert len(acceptor_of(under_test)._refused) == 1
            await under_test.until(lambda: not acceptor_of(under_test)._refused)
            under_test.workers["w0"].say(request, outputs_of(request, [7, 8]))
            assert (await waiting).status_code == 200


async def test_endless_strangers_keep_no_client_out_with_few_files(
    folder: Path, files: CertificateFiles
) -> None:
    """The gateway may open 1,100 files, and more silent strangers connect. Once, the strangers took the last file:
    HTTPS and gRPC stopped, and the log grew by megabytes a second."""
    own_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= own_limits[1] < 2000:
        pytest.skip("this machine does not allow a client so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, own_limits[1]))
    try:
        with limited_gateway(folder, files) as (ports, errors):
            with strangers(ports["http"], 1300):
                await ask_all(ports, files)
            await ask_all(ports, files)
        assert "Too many open files" not in errors.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, own_limits)


async def ask_all(ports: dict[str, int], files: CertificateFiles) -> None:
    async with https(ports["http"], files) as client:
        assert (await client.get("/health")).status_code == 200
    async with GatewayClient(f"localhost:{ports['grpc']}", credentials=files.credentials()) as grpc_client:
        assert (await grpc_client.model_info())["model"] == "tiny"


@contextmanager
def limited_gateway(folder: Path, files: CertificateFiles) -> Iterator[tuple[dict[str, int], Path]]:
    """A gateway in a process that may open 64 files, or 1,100 if it asks. Yields its ports and the path of its log."""
    errors = files.folder / "limited_gateway.log"
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.factories.limited_gateway",
                str(folder),
                str(files.folder),
                "64",
                "1100",
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, errors.read_text()
        yield json.loads(line), errors
        process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()
