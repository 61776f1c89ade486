"""ZmqChannel: carries messages with bytes after them. Peers connect to our ROUTER; we connect a DEALER to each peer.

Knows no protocol. Nothing here blocks: a message that cannot be queued is dropped and counted, and the
protocol repairs the loss.
"""

import errno
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from baton.clock import Clock
from baton.system.addresses import connect, listen
from baton.system.curve import PeerAuthenticator, PlaneKeys, secure_client
from baton.system.dead_connections import end_dead_connections
from kv_transfer.protocol.effects import Peer
from kv_transfer.protocol.messages import MAX_HEADER_BYTES
from kv_transfer.protocol.outgoing import BYTES_PER_TURN
from kv_transfer.transport.base import Arrival, Bytes

MAX_QUEUED_FRAMES = 10_000

MAX_PEERS = 256
"""The most connections to keep open. If there are more, the least recently used ones are closed, and reopened when they
are needed."""

IDLE_S = 30.0
"""A connection that was unused for this long is closed, since nothing would report a dead peer."""

LINGER_MS = 1000
"""The longest wait for queued messages to be sent before an unused connection is closed."""

RECONNECT_MS, MAX_RECONNECT_MS = 100, 2000
"""Delay before reconnecting to an unresponsive peer; doubles up to the second value."""

NUM_REFUSALS = 2
"""A peer counts as gone once this many attempts to connect to it have failed since it last sent something."""

UNDELIVERABLE = {
    *(zmq.EAGAIN, zmq.EHOSTUNREACH, errno.EMFILE),
    *(zmq.EINVAL, zmq.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO, errno.ENAMETOOLONG),
}
"""Errors which mean that a message cannot be delivered: the queue is full, the peer is gone, the peer's address (which
came from another process) is invalid, or no socket is left."""

MIN_FRAME_BYTES = 128 * 1024
"""Smaller spans are copied into one frame, which costs less than a frame for each of them."""

MAX_ARRIVALS_PER_TURN = 64
"""The most arrivals of one socket per turn: a peer that never stops sending must not delay commands and deadlines."""

DEAF_S = 0.0002
"""Waits of at most this time are plain sleeps, since ZeroMQ can only wait for whole milliseconds. A sleep does not end
when something arrives."""


@dataclass(slots=True)
class _Connection:
    """A connection to a worker."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    """Reports failed attempts to connect."""
    used_at: float
    """Time of the last message sent."""
    num_refusals: int = 0
    """Failed attempts to connect since something last arrived."""

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger_ms)


class ZmqChannel:
    """One rank's channel, for one thread. Peers connect to `address`, on a port that the system chooses."""

    def __init__(
        self,
        bind_host: str,
        block_nbytes: int,
        keys: PlaneKeys | None,
        clock: Clock,
        advertise_host: str | None = None,
        *,
        max_queued_bytes: int,
        dead_s: float,
        idle_s: float = IDLE_S,
    ) -> None:
        """`block_nbytes`: size of the largest piece. Without `keys`, every process that can connect is admitted.

        The hosts are those of `network` in the configuration; ConfigError if this machine has no such address. A
        payload is dropped if `max_queued_bytes` of earlier payloads are still queued for its peer. ZeroMQ reports
        slightly late that a payload has left its queue: by then, the peer may already have answered. Peers answer over
        the connection that we made, so `idle_s` must be longer than the pauses within a hand-over. A connection whose
        other end acknowledges nothing for `dead_s` is ended.
        """
        self._keys = keys
        self._clock = clock
        self._max_queued_bytes = max_queued_bytes
        self._idle_s = idle_s
        self._dead_s = dead_s
        self._max_payload_bytes = max(block_nbytes, BYTES_PER_TURN, MAX_HEADER_BYTES)
        self._context = zmq.Context()
        self._router = self._configured(zmq.ROUTER, MAX_HEADER_BYTES)  # consumers send no payload
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = PeerAuthenticator("the KV plane", self._router, keys)
        self.address = listen(self._router, bind_host, advertise_host)
        self._connections: dict[str, _Connection] = {}
        """By the peer's address, least recently used first."""
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._authenticator.register(self._poller)
        self._gone: set[str] = set()
        self._reading: zmq.Socket[bytes] | None = None
        self._queued: dict[Peer, deque[tuple[zmq.MessageTracker, int]]] = {}
        """By peer: the payloads that ZMQ may still read, with their sizes, oldest first."""
        self.num_dropped = 0

    @property
    def num_denied(self) -> int:
        """Number of refused connections; readable from any thread."""
        return self._authenticator.num_denied

    @property
    def num_disconnections(self) -> int:
        """Number of peers' connections that have ended, whichever side closed them; readable from any thread."""
        return self._authenticator.num_disconnections

    def wake_on(self, fd: int) -> None:
        """`wait` also returns while `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> Iterator[Arrival]:
        """Sleeps until something arrives or the time has passed, then yields the arrivals. May wake earlier.

        A sleep of at most DEAF_S does not end when something arrives.
        """
        self._close_unused()
        ready = self._poll(self._longest_sleep(timeout_s))
        self._authenticator.attend(ready)
        if self._router in ready:
            yield from self._arrivals(self._router, None)
        for address, connection in list(self._connections.items()):
            if connection.socket in ready:
                connection.num_refusals = 0
                yield from self._arrivals(connection.socket, address)
            if connection.monitor in ready and self._is_refused(connection):
                self._gone.add(address)

    def collect_gone(self) -> set[str]:
        """Addresses at which nothing listens any more, if `wait` has noticed this since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def read_payload(self) -> Iterator[Bytes]:
        """The payload of the current arrival. The arrays are views of ZMQ's memory."""
        assert self._reading is not None
        while self._reading.getsockopt(zmq.RCVMORE):
            yield np.frombuffer(self._reading.recv(copy=False).buffer, np.uint8)

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> bool:
        """Queues a header and the payload behind it. ZMQ reads the payload later, in place."""
        frames = list(_worth_a_frame(payload))
        more = zmq.SNDMORE if frames else 0
        if frames and self._num_queued_bytes(peer) >= self._max_queued_bytes:
            self.num_dropped += 1
            return False
        try:
            if isinstance(peer, bytes):
                socket = self._router
                socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            else:
                socket = self._connected(peer)
            socket.send(header, zmq.NOBLOCK | more)
            if frames:
                tracker = socket.send_multipart(
                    [frame.data for frame in frames], zmq.NOBLOCK, copy=False, track=True
                )
                assert tracker is not None
                self._queued.setdefault(peer, deque()).append((tracker, sum(map(len, frames))))
        except zmq.ZMQError as error:
            if error.errno not in UNDELIVERABLE:
                raise
            self.num_dropped += 1
            return False
        return True

    def close(self) -> None:
        self._authenticator.close()
        self._router.close()
        for connection in self._connections.values():
            connection.close(linger_ms=0)
        self._context.term()

    def _num_queued_bytes(self, peer: Peer) -> int:
        """Bytes that this peer has not read yet."""
        for other in list(self._queued) if len(self._queued) > MAX_PEERS else [peer]:
            queued = self._queued.get(other, deque())
            while queued and queued[0][0].done:
                queued.popleft()
            if not queued:
                self._queued.pop(other, None)
        return sum(num_bytes for _, num_bytes in self._queued.get(peer, ()))

    def _connected(self, address: str) -> "zmq.Socket[bytes]":
        connection = self._connections.pop(address, None) or self._connect(address)
        connection.used_at = self._clock.now()
        self._connections[address] = connection  # last in the dict
        return connection.socket

    def _connect(self, address: str) -> _Connection:
        dealer = self._configured(zmq.DEALER, self._max_payload_bytes)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        secure_client(dealer, self._keys)
        with ExitStack() as on_failure:
            on_failure.callback(dealer.close)
            on_failure.callback(dealer.disable_monitor)
            monitor = on_failure.enter_context(dealer.get_monitor_socket(zmq.EVENT_CLOSED))
            connect(dealer, address)
            on_failure.pop_all()
        for socket in (dealer, monitor):
            self._poller.register(socket, zmq.POLLIN)
        return _Connection(dealer, monitor, self._clock.now())

    def _close_unused(self) -> None:
        """Closes unused connections. Call it between turns: during a turn, the current arrival may still be read."""
        now, num_surplus = self._clock.now(), len(self._connections) - MAX_PEERS
        for position, (address, connection) in enumerate(list(self._connections.items())):
            if position >= num_surplus and now < connection.used_at + self._idle_s:
                break
            del self._connections[address]
            for socket in (connection.socket, connection.monitor):
                self._poller.unregister(socket)
            connection.close(LINGER_MS)

    def _is_refused(self, connection: _Connection) -> bool:
        """Counts the failed attempts that the monitor has reported. Returns whether there were too many."""
        while connection.monitor.poll(0):
            connection.monitor.recv_multipart()
            connection.num_refusals += 1
        return connection.num_refusals >= NUM_REFUSALS

    def _longest_sleep(self, timeout_s: float | None) -> float | None:
        """The time to sleep: `timeout_s`, or less, so that unused connections are closed in time."""
        oldest = next(iter(self._connections.values()), None)
        if oldest is not None:
            idle_s = max(0.0, oldest.used_at + self._idle_s - self._clock.now())
            timeout_s = idle_s if timeout_s is None else min(timeout_s, idle_s)
        return timeout_s

    def _poll(self, timeout_s: float | None) -> dict[Any, int]:
        """Events by socket or file descriptor. Waits until there is one, or the time has passed."""
        if timeout_s is None:
            return dict(self._poller.poll())
        if timeout_s > DEAF_S:
            return dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        ready = dict(self._poller.poll(0))
        if not ready and timeout_s > 0:
            time.sleep(timeout_s)
            ready = dict(self._poller.poll(0))
        return ready

    def _configured(self, kind: int, max_frame_bytes: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        end_dead_connections(socket, self._dead_s)
        return socket

    def _arrivals(self, socket: "zmq.Socket[bytes]", address: str | None) -> Iterator[Arrival]:
        """Yields headers until the socket is empty, or the turn is over. Skips payloads that the caller does not
        read."""
        self._reading = socket
        for _ in range(MAX_ARRIVALS_PER_TURN):
            try:
                peer: Peer = socket.recv(zmq.NOBLOCK) if address is None else address
                header = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield Arrival(peer, address is not None, header)
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(copy=False)


def _worth_a_frame(payload: Sequence[Bytes]) -> Iterator[Bytes]:
    """The same bytes; consecutive small spans are merged into one."""
    small: list[Bytes] = []
    for span in payload:
        if span.nbytes < MIN_FRAME_BYTES:
            small.append(span)
            continue
        if small:
            yield np.concatenate(small)
            small = []
        yield span
    if small:
        yield np.concatenate(small)
