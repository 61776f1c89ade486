"""TLS sessions and the authority of clients' certificates: once the authority is replaced, no earlier session is
accepted."""

import asyncio
import os
import shutil
import socket
import ssl
from pathlib import Path

import pytest

from baton.config import Tls
from tests.factories.certificates import CertificateFiles
from tests.factories.gateway import gateway_with

HTTP_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def client_context(files: CertificateFiles, version: ssl.TLSVersion, protocol: str) -> ssl.SSLContext:
    context = files.trusting(own=files)
    context.set_alpn_protocols([protocol])
    context.minimum_version = context.maximum_version = version
    return context


def session_of(
    port: int | None, context: ssl.SSLContext, words: bytes, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """Connects, and resumes `session` if the gateway does. Returns the connection's session; None if the client is
    refused."""
    try:
        plain = socket.create_connection(("127.0.0.1", port), timeout=60.0)
        with context.wrap_socket(plain, server_hostname="localhost", session=session) as connection:
            connection.sendall(words)
            if not connection.recv(
                1000
            ):  # in TLS 1.3 a client learns only now whether its certificate is accepted
                return None
            return connection.session
    except (ssl.SSLError, ConnectionError):
        return None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_no_session_outlives_the_authority_that_let_it_in(
    folder: Path,
    files: CertificateFiles,
    others: CertificateFiles,
    tmp_path: Path,
    version: ssl.TLSVersion,
    api: str,
) -> None:
    """A TLS 1.2 session resumed by its id once got an answer over HTTPS."""
    authority = tmp_path / "clients.pem"
    shutil.copy(files.ca, authority)
    tls = Tls(**{**files.tls(asks_clients=True), "client_ca_file": str(authority)})

    async with gateway_with(
        folder, {}, {}, tls=tls, credentials=files.credentials(has_own=True)
    ) as under_test:
        is_http = api == "http"
        port = under_test.gateway.http_port if is_http else under_test.gateway.grpc_port
        words = HTTP_REQUEST if is_http else HTTP2_PREFACE
        context = client_context(files, version, "http/1.1" if is_http else "h2")
        session = await asyncio.to_thread(session_of, port, context, words)
        assert session is not None
        assert await asyncio.to_thread(session_of, port, context, words, session) is not None
        shutil.copy(others.ca, tmp_path / "new.pem")
        os.replace(tmp_path / "new.pem", authority)
        await asyncio.sleep(1.1)  # real files and real TLS: the looks are a second apart
        assert await asyncio.to_thread(session_of, port, context, words) is None
        assert await asyncio.to_thread(session_of, port, context, words, session) is None
