"""ZmqChannel: messages, and bytes behind them: one ROUTER that others connect to, one DEALER per worker we connect to.

Knows no protocol. Nothing here blocks: what cannot be queued is dropped and counted, and the protocol heals it.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import zmq

from baton.addresses import connect, listen
from baton.curve import Doorkeeper, PlaneKeys, secure_client
from baton.wakeup import WakeUp
from kv_transfer.protocol.effects import Peer
from kv_transfer.protocol.messages import MAX_HEADER_BYTES
from kv_transfer.protocol.outgoing import BYTES_PER_TURN
from kv_transfer.transport.base import Arrival, Bytes

MAX_QUEUED_FRAMES = 10_000
MAX_PEERS = 256
"""Connections kept open; past this the one unused for longest is closed, and opened again when needed."""

UNDELIVERABLE = {zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.EINVAL, zmq.EPROTONOSUPPORT}
"""Its queue is full, its peer is gone, or its address, which another process gave us, is none."""

MIN_FRAME_BYTES = 128 * 1024
"""Smaller spans are copied into one: a frame of their own would cost more."""

MAX_ARRIVALS_PER_TURN = 64
"""A peer that never stops sending must not keep orders and deadlines waiting."""


class ZmqChannel:
    """Belongs to one thread. `address` is where others connect, on a port of the system's choosing."""

    def __init__(
        self, bind_host: str, block_nbytes: int, keys: PlaneKeys | None, advertise_host: str | None = None
    ) -> None:
        """`block_nbytes`: of the largest piece. Without `keys`, everybody who can connect is heard.

        The hosts are those of `network` in the configuration; ConfigError if this machine has no such place.
        """
        self._keys = keys
        self._max_message_bytes = max(block_nbytes, BYTES_PER_TURN, MAX_HEADER_BYTES)
        self._context = zmq.Context()
        self._router = self._configured(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._doorkeeper = Doorkeeper("the KV plane", self._router, keys)
        self.address = listen(self._router, bind_host, advertise_host)
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._doorkeeper.register(self._poller)
        self._reading: zmq.Socket[bytes] | None = None
        self.num_dropped = 0

    @property
    def num_denied(self) -> int:
        """Connections that were turned away; from any thread."""
        return self._doorkeeper.num_denied

    @property
    def num_disconnections(self) -> int:
        """Connections of others that ended, whoever ended them; from any thread."""
        return self._doorkeeper.num_disconnections

    def wake_on(self, wakeup: WakeUp) -> None:
        """`wait` also returns when `wakeup` is set."""
        self._poller.register(wakeup.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> Iterator[Arrival]:
        """Sleeps until something arrives or the time is over, then yields what has arrived."""
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        ready = dict(self._poller.poll(timeout_ms))
        self._doorkeeper.attend(ready)
        if self._router in ready:
            yield from self._arrivals(self._router, None)
        for address, dealer in list(self._dealers.items()):
            if dealer in ready:
                yield from self._arrivals(dealer, address)

    def read_payload(self) -> Iterator[Bytes]:
        """The payload of the arrival at hand, where ZMQ received it."""
        assert self._reading is not None
        while self._reading.getsockopt(zmq.RCVMORE):
            yield np.frombuffer(self._reading.recv(copy=False).buffer, np.uint8)

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> None:
        """Queues a header and the payload behind it, which ZMQ reads where it is, when its turn comes."""
        frames = list(_worth_a_frame(payload))
        more = zmq.SNDMORE if frames else 0
        try:
            if isinstance(peer, bytes):
                socket = self._router
                socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            else:
                socket = self._dealer(peer)
            socket.send(header, zmq.NOBLOCK | more)
            if frames:
                socket.send_multipart([frame.data for frame in frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in UNDELIVERABLE:
                raise
            self.num_dropped += 1

    def close(self) -> None:
        self._doorkeeper.close()
        for socket in [self._router, *self._dealers.values()]:
            socket.close()
        self._context.term()

    def _dealer(self, address: str) -> "zmq.Socket[bytes]":
        dealer = self._dealers.pop(address, None)
        if dealer is None:
            dealer = self._configured(zmq.DEALER)
            secure_client(dealer, self._keys)
            try:
                connect(dealer, address)
            except zmq.ZMQError:
                dealer.close()
                raise
            self._poller.register(dealer, zmq.POLLIN)
        self._dealers[address] = dealer  # last in the dict: the most recently used
        if len(self._dealers) > MAX_PEERS:
            oldest = self._dealers.pop(next(iter(self._dealers)))
            self._poller.unregister(oldest)
            oldest.close()
        return dealer

    def _configured(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        return socket

    def _arrivals(self, socket: "zmq.Socket[bytes]", address: str | None) -> Iterator[Arrival]:
        """Headers until the socket is empty, or it is somebody else's turn. What a reader left is skipped."""
        self._reading = socket
        for _ in range(MAX_ARRIVALS_PER_TURN):
            try:
                peer: Peer = socket.recv(zmq.NOBLOCK) if address is None else address
                header = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield Arrival(peer, address is not None, header)
            if socket.closed:  # to make room for another peer, in answering this arrival
                return
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(copy=False)


def _worth_a_frame(payload: Sequence[Bytes]) -> Iterator[Bytes]:
    """The same bytes; small spans that follow one another are copied into one."""
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
