"""MetricsServer: answers GET and HEAD of /metrics on its own threads; a silent reader delays no other reader."""

import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

Render = Callable[[str], tuple[bytes, str]]
"""Gets the formats that a reader accepts; returns all metrics in one of them, and their content type."""

PATIENCE_S = 2.0
"""A reader may take this long to send its request, and then as long again to read the answer."""

MAX_READERS = 8
"""The most readers at a time, each on its own thread. The next reader replaces the oldest."""

MAX_REQUEST_BYTES = 16 * 1024

PAUSE_S = 1.0
"""Pause after a failed accept. The usual cause is that the process has no free file descriptor."""

logger = logging.getLogger(__name__)


class MetricsServer:
    """The server, which is started once, and stopped once."""

    def __init__(self, listener: socket.socket, render: Render) -> None:
        """`listener` is bound, and belongs to the server from now on. `render` is called on the server's threads, by
        one of them at a time."""
        self._listener = listener
        self._render = render
        self._rendering = threading.Lock()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._readers: dict[socket.socket, threading.Thread] = {}
        """Oldest first. The server's thread adds readers; each reader removes itself."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes the port. A reader that is being answered delays this by at most PATIENCE_S. May be called before
        `start`."""
        self._is_stopping.set()
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        for reader, thread in list(self._readers.items()):
            _shut(reader, socket.SHUT_RD)  # ends the reader unless its request has arrived
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._is_stopping.wait(PAUSE_S):
                    logger.error("cannot accept a metrics connection, retrying: %s", error)
                continue
            if len(readers := list(self._readers.items())) >= MAX_READERS:
                oldest, thread = readers[0]
                _shut(oldest, socket.SHUT_RDWR)
                thread.join()
            reader = threading.Thread(
                target=self._serve, args=(connection, address), name="metrics-reader", daemon=True
            )
            self._readers[connection] = reader
            try:
                reader.start()
            except RuntimeError as error:
                logger.error("cannot start a thread for a reader of metrics: %s", error)
                del self._readers[connection]
                connection.close()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        with connection:
            try:
                _Reader(connection, address, self._render_alone)
            except OSError as error:
                logger.debug("a metrics reader disconnected early: %s", error)
            except Exception:
                logger.exception("failed to render metrics")
            finally:
                del self._readers[connection]

    def _render_alone(self, accept: str) -> tuple[bytes, str]:
        with self._rendering:
            return self._render(accept)


class _Reader(BaseHTTPRequestHandler):
    """Handles one request on construction."""

    timeout = PATIENCE_S

    def __init__(self, connection: socket.socket, address: Any, render: Render) -> None:
        self._render = render
        super().__init__(connection, address, None)  # type: ignore[arg-type] # there is no server to ask

    def setup(self) -> None:
        """For the answer, `timeout` limits the whole time. For the request, it limits only each read. So `_head_from`
        reads the request, and limits the time of all reads together."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(_head_from(self.connection))

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body, content_type = self._render(self.headers.get("accept", ""))
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name that BaseHTTPRequestHandler calls

    def version_string(self) -> str:
        return "baton"

    def log_message(self, format: str, *args: object) -> None:
        """Silent, since every scrape would log a line."""


def _head_from(connection: socket.socket) -> bytes:
    """A request's line and headers; OSError if they do not arrive within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    head = b""
    while b"\r\n\r\n" not in head:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        data = connection.recv(MAX_REQUEST_BYTES)
        if not data or len(head) > MAX_REQUEST_BYTES or time.monotonic() > deadline:
            raise TimeoutError("the request did not arrive in time, or is too large")
        head += data
    connection.settimeout(PATIENCE_S)
    return head


def _shut(connection: socket.socket, how: int) -> None:
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(how)
