"""HttpServer: serves an ASGI application on one port, in the current event loop."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.clock import Clock
from baton.errors import ConfigError
from baton.system.watched import Watched
from gateway.auth.certificates import Certificates
from gateway.http.acceptor import BACKLOG, Acceptor
from gateway.http.connection_places import ConnectionPlaces
from gateway.http.paced_parser import ReadTurns
from gateway.http.protocol import BoundedH11

SEND_BUFFER_BYTES = 128 * 1024
"""Requested size of the kernel's send buffer of each connection; the kernel allocates twice as much."""

LAST_REQUESTS_S = 1.0
"""How long a stopping gateway still takes requests on open connections. A proxy may have sent one before it learns that
the connection ends, and can send it to no other gateway: the request may not be one to repeat."""

LAST_RESPONSES_S = 1.0
"""How long a stopping gateway waits for its last responses to be sent, and for cancelled requests to end."""


class HttpServer:
    """One instance serves once: call `start`, then `stop` at least once."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        clock: Clock,
        certificates: Watched[Certificates] | None = None,
        *,
        max_connections: int,
        write_timeout_s: float,
        on_refused: Callable[[str], None],
    ) -> None:
        """With `certificates`, the server accepts only HTTPS. `on_refused`: see Acceptor and BoundedH11."""
        self._host = host
        self._port = port
        self._places = ConnectionPlaces[BoundedH11](max_connections)
        self._turns = ReadTurns()
        self._write_timeout_s = write_timeout_s
        self._on_refused = on_refused
        tls = None if certificates is None else lambda: certificates.current().context
        acceptor = Acceptor(self._protocol, tls, self._places, on_refused, clock)
        self._server = _Server(
            uvicorn.Config(
                self._closing_when_stopping(app),
                http="h11",
                ws="none",
                lifespan="off",  # so every scope is that of a request, and no middleware checks this
                log_config=None,
                access_log=False,
                server_header=False,
            ),
            acceptor,
        )
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Binds the port and serves. Raises ConfigError if the server cannot listen there."""
        try:
            listener = socket.create_server(
                (self._host, self._port), family=address_family(self._host), backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"gateway.http_port: cannot listen on {self._host}:{self._port}: {error.strerror}"
            ) from error
        _set_up(listener, self._write_timeout_s)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait([self._serving, started], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            await self._serving

    async def stop(self, grace_s: float) -> None:
        """Refuses new connections. Each open connection closes after its answer, or LAST_REQUESTS_S after the last one
        if no request comes. Requests may continue for `grace_s`; then they end as if their clients had disconnected."""
        if self._serving is None:
            return
        self._server.grace_s = grace_s
        self._server.should_exit = True
        await asyncio.shield(self._serving)

    def _protocol(self, is_refused: bool) -> BoundedH11:
        """Returns the protocol of a new connection. It uses h11, because httptools does not bound headers."""
        limit = f"{self._places.number} connections are open, which is the limit"
        return BoundedH11(
            self._server.config,
            self._server.server_state,
            {},
            refusal=limit if is_refused else None,
            places=self._places,
            turns=self._turns,
            write_timeout_s=self._write_timeout_s,
            on_refused=self._on_refused,
        )

    def _closing_when_stopping(self, app: ASGIApp) -> ASGIApp:
        """The application, whose answers tell clients of a stopping server to send no further request on their
        connection."""

        async def closing(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                if message["type"] == "http.response.start" and self._server.should_exit:
                    MutableHeaders(scope=message)["connection"] = "close"
                await send(message)

            await app(scope, receive, send_last)

        return closing


def _set_up(listener: socket.socket, write_timeout_s: float) -> None:
    """Sets socket options, which accepted connections inherit. If a client does not read, the kernel buffers
    little, and only for a limited time. If a client reads, the kernel sends without delay."""
    # Without TCP_NODELAY, a second small write waits 40 ms for the client's delayed acknowledgement of the
    # first. A stream's first event is such a write. asyncio sets TCP_NODELAY only if a socket names its
    # protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if sys.platform == "linux":  # only Linux limits how long unsent data may wait in the kernel
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(write_timeout_s * 1000))
        )


class _Server(uvicorn.Server):
    """A uvicorn server that handles no signals. It sets `has_started` when it listens."""

    grace_s = 0.0
    """How long running requests may continue after the server was told to stop."""

    def __init__(self, config: uvicorn.Config, acceptor: Acceptor) -> None:
        super().__init__(config)
        self.acceptor = acceptor
        self.has_started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Our Acceptor accepts the connections, not uvicorn. uvicorn uses asyncio's server, which does not
        count handshakes and does not pause when the process has no file descriptors left."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            self.acceptor.start(listener)
        self.has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's `shutdown`, which polls open connections ten times a second, and logs an error if some
        stay open."""
        self.acceptor.stop_listening()
        for listener in sockets or []:
            listener.close()
        last_requests_s = min(LAST_REQUESTS_S, self.grace_s)
        await self.acceptor.join(last_requests_s)
        self.acceptor.cancel_handshakes()
        for connection in self._connections:
            connection.shutdown()
        await self._wait_until_closed(self.grace_s - last_requests_s)
        for connection in self._connections:
            connection.end()
        await self._wait_until_closed(LAST_RESPONSES_S)
        for connection in self._connections:
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()
        await self.acceptor.join(LAST_RESPONSES_S)

    @property
    def _connections(self) -> list[BoundedH11]:
        """A copy of the open connections."""
        return [each for each in self.server_state.connections if isinstance(each, BoundedH11)]

    async def _wait_until_closed(self, timeout_s: float) -> None:
        """Returns when all connections are closed and all their requests have ended, at the latest after
        `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for connection in self._connections:
                    await connection.is_over.wait()
                if self.server_state.tasks:
                    await asyncio.wait(self.server_state.tasks)


def address_family(host: str) -> socket.AddressFamily:
    """The one family of addresses on which the HTTP server listens; gRPC uses all addresses of the host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
