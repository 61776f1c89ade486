"""A real redis-server on loopback, without a disk. Tests skip if it is not installed."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

START_TIMEOUT_S = 60.0


class RedisServer:
    """The process of the server, and its address."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process = process
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Skips the test if redis-server is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server: apt install redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = RedisServer(subprocess.Popen([program, *options], stdout=subprocess.DEVNULL), port)
    try:
        _wait_for(server)
        yield server
    finally:
        server.stop()


def _wait_for(server: RedisServer) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        assert server.process.poll() is None, "redis-server ended at once"
        try:
            with socket.create_connection(("127.0.0.1", server.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("redis-server does not answer")
