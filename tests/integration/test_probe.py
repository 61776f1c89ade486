"""`baton probe` with all its targets: a gateway's pages with and without TLS, a control server, and plain ports."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton.system.secret import SECRET_VARIABLE
from cli.main import DONE, REFUSED, USAGE, main
from tests.factories.certificates import CertificateFiles, make_certificate
from tests.factories.control_api import control_server, in_process
from tests.factories.fleet import fleet, fleet_config
from tests.factories.security import SECRET


class Pages(BaseHTTPRequestHandler):
    """The pages of a gateway that is alive, but not ready."""

    def do_GET(self) -> None:
        code, body = (200, b"{}") if self.path == "/health" else (503, b'{"reason": "no decode worker"}')
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class QuietServer(ThreadingHTTPServer):
    """Prints no error for a failed handshake, since a test makes handshakes fail."""

    def handle_error(self, *_: object) -> None: ...


@contextmanager
def pages(context: ssl.SSLContext | None = None) -> Iterator[str]:
    """HOST:PORT of such a server."""
    with QuietServer(("127.0.0.1", 0), Pages) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_is_well_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pages() as address:
        assert main(["probe", f"http://{address}/health"]) == DONE
        assert capsys.readouterr() == ("", "")
        assert main(["probe", f"http://{address}/ready"]) == REFUSED
    expected = (
        f'baton probe: http://{address}/ready: 503 Service Unavailable: {{"reason": "no decode worker"}}\n'
    )
    assert capsys.readouterr().err == expected


def test_nobody_there_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://127.0.0.1:1/health", "https://127.0.0.1:1/health", "tcp://127.0.0.1:1"):
        assert main(["probe", url]) == REFUSED
        assert capsys.readouterr().err.startswith(f"baton probe: {url}: ")


def test_who_accepts_and_says_nothing_is_not_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main(["probe", f"tcp://{address}"]) == DONE
        assert main(["probe", f"http://{address}/health", "--timeout", "0.1"]) == REFUSED


def test_a_gateway_with_tls_is_asked_as_it_wants(
    files: CertificateFiles, others: CertificateFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.folder / "gateway.pem", files.folder / "gateway.key")
    with pages(context) as address:
        health = f"https://{address}/health"
        assert main(["probe", health]) == DONE
        assert main(["probe", health, "--tls-ca", str(files.ca)]) == DONE
        assert main(["probe", health, "--tls-ca", str(others.ca)]) == REFUSED
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    with pages(context) as address:
        health = f"https://{address}/health"
        assert main(["probe", health]) == REFUSED
        cert, key = files.folder / "alice.tls.pem", files.folder / "alice.tls.key"
        own = ["--tls-cert", str(cert), "--tls-key", str(key)]
        assert main(["probe", health, *own]) == DONE


def test_an_authority_counts_as_in_grpc(tmp_path: Path, files: CertificateFiles) -> None:
    """Python would refuse both authorities of this test: one lacks extensions of RFC 5280 (from Python 3.13 on), and
    one lacks its root (before 3.13)."""
    make_certificate(
        tmp_path, "plain", (files.ca, files.folder / "ca.key"), "-addext", "basicConstraints=CA:TRUE"
    )
    plain = tmp_path / "plain.pem"
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE")
    make_certificate(tmp_path, "gateway", (plain, tmp_path / "plain.key"), *names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "gateway.pem", tmp_path / "gateway.key")
    with pages(context) as address:
        assert main(["probe", f"https://{address}/health", "--tls-ca", str(plain)]) == DONE


async def test_a_fleet_is_well_once_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)

    config = fleet_config()
    async with fleet(config) as tested, control_server(config, None) as server:
        probe = ["probe", f"fleet://{server.address}", "--timeout", "20"]
        assert await asyncio.to_thread(main, probe) == REFUSED
        assert "still starting" in capsys.readouterr().err
        await server.serve(in_process(tested.controller, config))
        assert await asyncio.to_thread(main, probe) == DONE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:8000"], "URL: got '127.0.0.1:8000'; use SCHEME://HOST:PORT"),
        (["http://10.0.0..1:8000"], "URL: got 'http://10.0.0..1:8000'; use SCHEME://HOST:PORT"),
        (["ftp://127.0.0.1:8000"], "URL: got"),
        (["http://127.0.0.1"], "URL: got"),
        (["http://[::1/"], "URL: got"),
        (["http://127.0.0.1:99999/"], "URL: got"),
        (
            ["tcp://127.0.0.1:80/some/path"],
            "URL: got 'tcp://127.0.0.1:80/some/path'; tcp and fleet take no path",
        ),
        (["fleet://127.0.0.1:80?x"], "URL: got 'fleet://127.0.0.1:80?x'; tcp and fleet take no path"),
        (["http://127.0.0.1:80/", "--tls-ca", "x"], "--tls-ca, --tls-cert and --tls-key need an https URL"),
        (
            ["http://127.0.0.1:80/", "--secret-file", "x"],
            "--secret-file needs a fleet URL, but this one is http",
        ),
        (["https://127.0.0.1:80/", "--tls-key", "x"], "--tls-key needs --tls-cert"),
        (
            ["https://127.0.0.1:80/", "--tls-ca", "/no/file"],
            "--tls-ca /no/file: cannot be read: No such file",
        ),
        (["https://127.0.0.1:80/", "--tls-cert", "/no/file"], "--tls-cert /no/file: cannot be read: No such"),
        (
            ["https://127.0.0.1:80/", "--tls-ca", "/dev/null"],
            "cannot use --tls-ca, --tls-cert or --tls-key: ",
        ),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == USAGE
    assert capsys.readouterr().err.startswith(f"baton probe: {message}")
