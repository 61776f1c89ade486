"""Scenes at the edges of a service: handshakes without end, sessions of a former authority, a private Ray's folder."""

import asyncio
import resource
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from gateway.client import GatewayClient
from tests.factories.certificates import CertificateFiles, make_certificates
from tests.factories.serving import ServeProcess, serving
from tests.hostile.finding import Finding

NUM_STRANGERS = 2_500
MAX_CONNECTIONS = 64
LOOKS = 20
PROBE_TIMEOUT_S = 10.0
RELOAD_S = 30.0

Edge = Callable[[Path, Path], Finding]
"""A model's folder, and one to write to."""


def handshakes(model: Path, folder: Path) -> Finding:
    """Strangers connect to HTTPS and say nothing, many times more than there are places."""
    finding = Finding(f"{NUM_STRANGERS} TLS handshakes that are never completed, at {MAX_CONNECTIONS} places")
    files = make_certificates(folder)
    options = f"max_connections: {MAX_CONNECTIONS}, {_tls(files)}"
    with edge_gateway(model, folder, options) as (serve, https, grpc_target), ExitStack() as stack:
        address = ("127.0.0.1", https)
        for _ in range(NUM_STRANGERS):
            stack.enter_context(socket.create_connection(address, timeout=PROBE_TIMEOUT_S))
        num_https = sum(_answers(https, files) for _ in range(LOOKS))
        num_grpc = sum(asyncio.run(_answers_grpc(grpc_target, files)) for _ in range(LOOKS))
        num_files = psutil.Process(serve.process.pid).num_fds()
        num_lines = serve.stderr.count("\n")
    finding.seen["HTTPS answered"] = f"{num_https} of {LOOKS}"
    finding.seen["gRPC answered"] = f"{num_grpc} of {LOOKS}"
    finding.seen["open files"] = num_files
    finding.seen["lines in the log"] = num_lines
    finding.expect(num_https == num_grpc == LOOKS, "a caller was kept out")
    finding.expect(num_files < 1_000, "connections that say nothing take files")
    finding.expect(num_lines < 100, "the log grows with each stranger")
    return finding


def sessions(model: Path, folder: Path) -> Finding:
    """A client with a session from before its authority was replaced."""
    finding = Finding("a TLS session from before the clients' authority was replaced")
    files = make_certificates(folder)
    other = make_certificates(_made(folder / "other"))
    authority = folder / "clients.pem"
    shutil.copy(files.ca, authority)
    with edge_gateway(model, folder, _tls(files, f", client_ca_file: {authority}")) as (_, https, _grpc):
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = _context(files, version)
            status, session = _get(https, context)
            again, _ = _get(https, context, session)
            finding.seen[f"{version.name} before"] = f"{status}, with its session {again}"
            finding.expect(status == again == "200", f"{version.name}: a good client was kept out")
            _replace(authority, other.ca)
            refused = _until_refused(https, context)
            late, _ = _get(https, context, session)
            finding.seen[f"{version.name} after"] = f"{refused}, with its session {late}"
            finding.expect(
                refused != "200" != late, f"{version.name}: a client of the former authority was let in"
            )
            _replace(authority, files.ca)
            _until_refused(https, _context(other, version))
    return finding


def ray_folder(model: Path, folder: Path) -> Finding:
    """Another user of the machine looks for files to which that user may write."""
    finding = Finding("the folder of a private Ray")
    config = folder / "ray.yaml"
    config.write_text(_config(model, "local", "grpc_port: 0, http_port: 0"))
    with serving(str(config)) as serve:
        serve.wait_ready()
        for root in serve.temporary.glob("baton-ray-*"):
            mode = root.stat().st_mode & 0o777
            finding.seen[root.name] = oct(mode)
            finding.expect(mode == 0o700, f"{root} can be entered by others: {oct(mode)}")
        finding.expect(len(finding.seen) == 1, f"one folder was expected: {finding.seen}")
        serve.interrupt()
        finding.expect(serve.wait_gone() == 0, "baton serve did not end well")
    return finding


EDGES: dict[str, Edge] = {"handshakes": handshakes, "sessions": sessions, "ray-folder": ray_folder}


@contextmanager
def edge_gateway(model: Path, folder: Path, options: str) -> Iterator[tuple[ServeProcess, int, str]]:
    """`baton serve` with a soft limit of 1,024 files, as logins have. Yields the process, its HTTPS port and its gRPC
    target."""
    config = folder / "edge.yaml"
    config.write_text(_config(model, "none", f"grpc_port: 0, http_port: 0, {options}"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with serving(str(config)) as serve:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(8_192, hard), hard))
            ready = serve.wait_ready()
            grpc_port = ready["target"].rpartition(":")[2]
            yield serve, int(ready["http"].rpartition(":")[2]), f"localhost:{grpc_port}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _config(model: Path, ray: str, gateway: str) -> str:
    return (
        f"model: {{path: {model}, dtype: float32}}\n"
        "engine: {kv_cache_memory_mib: 8, num_threads: 1}\n"
        f"cluster: {{ray_address: {ray}, prefill: 0, decode: 1}}\n"
        f"gateway: {{{gateway}}}\n"
    )


def _tls(files: CertificateFiles, more: str = "") -> str:
    names = files.tls()
    return f"tls: {{cert_file: {names['cert_file']}, key_file: {names['key_file']}{more}}}"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _context(files: CertificateFiles, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca))
    context.check_hostname = False
    context.verify_mode = (
        ssl.CERT_NONE
    )  # the gateway's is signed by the first authority, whichever signed the client's
    context.load_cert_chain(files.folder / "alice.tls.pem", files.folder / "alice.tls.key")
    context.minimum_version = context.maximum_version = version
    return context


def _get(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[str, ssl.SSLSession | None]:
    """The status of GET /health, or the error of the connection; and the TLS session, if there is one."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            answer = connection.recv(4096)
            return answer[9:12].decode() or "closed", connection.session
    except OSError as error:
        return type(error).__name__, None


def _until_refused(port: int, context: ssl.SSLContext) -> str:
    """Repeats the handshake until it is refused. Returns the outcome of the last one."""
    for _ in range(int(RELOAD_S / 0.25)):
        status, _ = _get(port, context)
        if status != "200":
            return status
        asyncio.run(asyncio.sleep(0.25))
    return "200"


def _replace(file: Path, by: Path) -> None:
    shutil.copy(by, file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def _answers(port: int, files: CertificateFiles) -> bool:
    return _get(port, _context(files, ssl.TLSVersion.TLSv1_3))[0] == "200"


async def _answers_grpc(target: str, files: CertificateFiles) -> bool:
    async with (
        asyncio.timeout(PROBE_TIMEOUT_S),
        GatewayClient(target, credentials=files.credentials()) as client,
    ):
        return bool((await client.model_info())["model"])
