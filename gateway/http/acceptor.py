"""Acceptor: accepts HTTP connections from a listening socket, up to a limit; does not handle requests.

A connection counts as soon as it is accepted, before its TLS handshake has ended. At the limit, a new
connection replaces an idle one: see ConnectionPlaces.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from baton.clock import Clock
from gateway.http.connection_places import ConnectionPlaces
from gateway.http.protocol import TOO_MANY, BoundedH11

BACKLOG = 1024
"""So many connections may wait in the kernel to be accepted."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Longest time from the accept of a connection to the end of its TLS handshake."""

MAX_REFUSALS = 64
"""At most this many connections beyond the limit get a refusal at the same time. A further connection cuts off the
oldest of them, so connections that never close keep no client from its refusal."""
REFUSAL_TIMEOUT_S = 2.0
"""How long a connected client may take to read its refusal and to close its connection."""

ACCEPTS_PER_TURN = 16
"""How many connections are accepted per turn of the event loop. Handshakes proceed between turns. So in a burst of
connections, the first ones can end their handshakes before later ones would displace them."""

PAUSE_S = 1.0
"""Pause after an accept failed for lack of file descriptors or memory. Without the pause, the listening
socket stays readable, and the event loop repeats the accept without end."""
LOG_INTERVAL_S = 60.0

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger(__name__)


class Acceptor:
    """One instance is used once: `start`, `stop_listening`, then `cancel_handshakes`; `join` at any time. Each
    connection has a task, which ends with it."""

    def __init__(
        self,
        make_protocol: Callable[[bool], BoundedH11],
        tls: Callable[[], ssl.SSLContext] | None,
        places: ConnectionPlaces[BoundedH11],
        on_refused: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """The argument of `make_protocol` says whether to refuse the connection. `tls` returns the TLS
        context for a new connection. `on_refused` receives TOO_MANY for each connection that is refused or
        displaced."""
        self._make_protocol = make_protocol
        self._tls = tls
        self._places = places
        self._on_refused = on_refused
        self._clock = clock
        self._listener: socket.socket | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._tasks: dict[BoundedH11, asyncio.Task[None]] = {}
        self._refused: dict[BoundedH11, None] = {}
        """Connections that get a refusal, the oldest first."""
        self._num_failures = 0
        """Number of failed accepts since the last log line about failed accepts."""
        self._logged_at: float | None = None

    def start(self, listener: socket.socket) -> None:
        """Accepts connections from now on. The caller still owns the socket, and closes it."""
        listener.setblocking(False)
        self._listener = listener
        self._listen()

    def stop_listening(self) -> None:
        """Accepts the connections that wait in the kernel, and no further ones. The kernel would reset those that wait
        when the socket is closed, although their clients may have sent requests."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._resume is not None:
            self._resume.cancel()
        for _ in range(BACKLOG):  # more may come meanwhile
            if self._accept_one(self._listener) is not None:
                break
        self._listener = None

    def cancel_handshakes(self) -> None:
        for protocol, task in self._tasks.items():
            if not protocol.is_established:
                task.cancel()

    async def join(self, timeout_s: float) -> None:
        """Returns when every connection has ended by itself, at the latest after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)

    def _listen(self) -> None:
        self._resume = None
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener, self._accept_some, self._listener)

    def _accept_some(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if (error := self._accept_one(listener)) is not None:
                if error.errno in _EXHAUSTED:
                    self._pause(listener, error)
                return

    def _accept_one(self, listener: socket.socket) -> OSError | None:
        """Returns why there is no further connection now; None if one was accepted."""
        try:
            connection, address = listener.accept()
        except OSError as error:  # none waits; or no file descriptors are left
            return error
        connection.setblocking(False)
        self._begin_connection(connection, address[0])
        return None

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._resume = loop.call_later(PAUSE_S, self._listen)
        self._num_failures += 1
        now = self._clock.now()
        if self._logged_at is None or now - self._logged_at >= LOG_INTERVAL_S:
            logger.error(
                "cannot accept HTTP connections: %s; retrying every %g s (%d failed attempt(s) since the "
                "last such line); raise `ulimit -Hn`, or lower gateway.max_connections (%d)",
                error.strerror,
                PAUSE_S,
                self._num_failures,
                self._places.number,
            )
            self._logged_at, self._num_failures = now, 0

    def _begin_connection(self, connection: socket.socket, address: str) -> None:
        is_refused = False
        if self._places.is_full:
            self._on_refused(TOO_MANY)
            is_refused = not self._displace_one()
            if is_refused and len(self._refused) >= MAX_REFUSALS:
                self._cut_off(next(iter(self._refused)))
        protocol = self._make_protocol(is_refused)
        serving = self._serve(connection, protocol, REFUSAL_TIMEOUT_S if is_refused else None)
        task = asyncio.get_running_loop().create_task(serving)
        self._tasks[protocol] = task
        if is_refused:
            self._refused[protocol] = None
        else:
            self._places.enter(protocol, address)
        task.add_done_callback(lambda task: self._forget(protocol, task, connection))

    def _displace_one(self) -> bool:
        """Closes one idle connection. Returns False if every connection has a running request."""
        protocol = self._places.victim()
        if protocol is None:
            return False
        self._cut_off(protocol)
        return True

    def _cut_off(self, protocol: BoundedH11) -> None:
        self._places.leave(protocol)
        self._refused.pop(protocol, None)
        if protocol.is_established:
            protocol.transport.abort()
        else:
            self._tasks[protocol].cancel()

    async def _serve(self, connection: socket.socket, protocol: BoundedH11, timeout_s: float | None) -> None:
        """Returns when the connection is closed, at the latest `timeout_s` after its handshake. None: no limit."""
        context = None if self._tls is None else self._tls()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HANDSHAKE_TIMEOUT_S,
            )
        except OSError:  # the client used no TLS, had no trusted certificate, was too slow, or disconnected
            return
        if not protocol.is_established:  # the connection was lost during the handshake
            return
        try:
            async with asyncio.timeout(timeout_s):
                await protocol.is_over.wait()
        except TimeoutError:
            protocol.transport.abort()

    def _forget(self, protocol: BoundedH11, task: "asyncio.Task[None]", connection: socket.socket) -> None:
        del self._tasks[protocol]
        self._places.leave(protocol)
        self._refused.pop(protocol, None)
        connection.close()  # already closed, unless the task was cancelled before it began
        if not task.cancelled() and (error := task.exception()):
            logger.error("error in an HTTP connection", exc_info=error)
