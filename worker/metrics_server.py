"""MetricsServer: answers GET /metrics over HTTP on a thread of its own, one reader after the other."""

import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

Render = Callable[[str], tuple[bytes, str]]
"""All metrics for a reader that accepts this format, and their content type."""

PATIENCE_S = 2.0
"""How long a reader may take to ask, and again to read the answer. Meanwhile only other readers wait."""

MAX_REQUEST_BYTES = 16 * 1024

PAUSE_S = 1.0
"""Pause after a failed accept, usually for lack of files."""

logger = logging.getLogger(__name__)


class MetricsServer:
    """Used once: `start`, then `stop`."""

    def __init__(self, listener: socket.socket, render: Render) -> None:
        """`listener` is bound, and belongs to the server from now on. `render` is called on the server's thread."""
        self._listener = listener
        self._render = render
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes the port. A reader that is being answered delays this by at most PATIENCE_S. May be called before
        `start`."""
        self._is_stopping.set()
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join(PATIENCE_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._is_stopping.wait(PAUSE_S):
                    logger.error("cannot accept a metrics connection, retrying: %s", error)
                continue
            with connection:
                try:
                    _Reader(connection, address, self._render)
                except OSError as error:
                    logger.debug("a metrics reader disconnected early: %s", error)
                except Exception:
                    logger.exception("failed to render metrics")


class _Reader(BaseHTTPRequestHandler):
    """Handles one request on construction."""

    timeout = PATIENCE_S

    def __init__(self, connection: socket.socket, address: Any, render: Render) -> None:
        self._render = render
        super().__init__(connection, address, None)  # type: ignore[arg-type] # there is no server to ask

    def setup(self) -> None:
        """`timeout` applies to each received byte, and to the whole answer."""
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
        self.wfile.write(body)

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
