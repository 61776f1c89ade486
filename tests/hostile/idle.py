"""A scene at both frontends: strangers open connections, send just enough to keep them open, and stay."""

import asyncio
import http.client
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from gateway.auth.credentials import Credentials
from gateway.auth.key_store import hash_of, new_key
from gateway.client import GatewayClient, GatewayError
from gateway.grpc.server import CONNECTION_IDLE_S
from tests.hostile.edges import edge_gateway
from tests.hostile.finding import Finding

NUM_STRANGERS = 500
MAX_CONNECTIONS = 64
LOOKS = 20
TIMEOUT_S = 10.0
GRPC_END_S = 2 * CONNECTION_IDLE_S + 30.0
"""gRPC looks for idle connections once in that time."""

SAYS = {
    "http": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04" + b"\x00" * 5,
}


def idle_connections(model: Path, folder: Path) -> Finding:
    """Many times more strangers than there are places, from one address."""
    finding = Finding(
        f"{NUM_STRANGERS} idle connections without a key, at {MAX_CONNECTIONS} places of each API"
    )
    key, keys = new_key(), folder / "keys.yaml"
    keys.write_text(f"- name: alice\n  sha256: {hash_of(key)}\n")
    options = f"max_connections: {MAX_CONNECTIONS}, api_keys_file: {keys}"
    with edge_gateway(model, folder, options) as (_, http_port, target):
        with ExitStack() as stack:
            _open(stack, http_port, SAYS["http"])
            num_answered = sum(_status(http_port, key) == 200 for _ in range(LOOKS))
        with ExitStack() as stack:
            _open(stack, int(target.rpartition(":")[2]), SAYS["grpc"])
            began = time.monotonic()
            is_answered = asyncio.run(_answers(target, key))
            waited_s = time.monotonic() - began
    finding.seen["HTTP answered a caller with a key"] = f"{num_answered} of {LOOKS}"
    finding.seen["gRPC answered one"] = f"after {waited_s:.0f} s" if is_answered else "never"
    finding.expect(num_answered == LOOKS, "a caller was kept out of HTTP")
    finding.expect(is_answered, "callers are kept out of gRPC for ever")
    return finding


def _open(stack: ExitStack, port: int, say: bytes) -> None:
    for _ in range(NUM_STRANGERS):
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
        try:
            stranger.sendall(say)
        except OSError:  # refused
            continue


def _status(port: int, key: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


async def _answers(target: str, key: str) -> bool:
    """Whether the gateway answers before the time of every stranger is over."""
    deadline = time.monotonic() + GRPC_END_S
    while time.monotonic() < deadline:
        async with GatewayClient(target, credentials=Credentials(api_key=key)) as client:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return bool((await client.model_info())["model"])
            except (GatewayError, TimeoutError):
                await asyncio.sleep(1.0)
    return False
