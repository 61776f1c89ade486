"""The fleet door's socket inside an event loop: whole messages in and out, connections admitted; knows no message."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from baton.config import NetworkConfig
from baton.system.addresses import listen
from baton.system.curve import PeerAuthenticator, PlaneKeys
from cluster.control_api.desk import MAX_CALLS_OF_ONE
from cluster.control_api.messages import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

LAST_WORDS_MS = 500
"""What the last answers get to leave before the port is closed."""

_MESSAGES_AT_ONCE = 64
"""Then others in the event loop have their turn."""

OnMessage = Callable[[bytes, list[bytes]], None]
"""Of which connection, and its frames."""


class DoorPort:
    """Bound from its making to `close`; nobody is served before `open`. Belongs to one event loop.

    Messages that come faster than they are taken wait in bounded queues, then at their senders. libzmq tells of news by
    file descriptors that speak up once, so after each of those, and after whatever else touches the socket, everything
    that is there is taken in (zmq_getsockopt(3), ZMQ_FD).
    """

    def __init__(self, network: NetworkConfig, port: int, keys: PlaneKeys | None) -> None:
        """Port 0 is a free one. Without `keys`, everybody who can connect is served. ConfigError if it is taken."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # More than answers of calls that may be under way: who does not read loses them, and nobody waits for it.
        self._socket.setsockopt(zmq.SNDHWM, 2 * MAX_CALLS_OF_ONE)
        self._socket.setsockopt(zmq.RCVHWM, 2 * MAX_CALLS_OF_ONE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        set_heartbeats(self._socket, network)
        self._authenticator = PeerAuthenticator("the fleet's door", self._socket, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._authenticator.register(self._poller)
        self._descriptors: list[int] = []
        self._is_pump_due = False
        try:
            address = listen(
                self._socket, network.bind_host, network.advertise_host, port, "cluster.fleet_port"
            )
        except BaseException:
            self.close()
            raise
        self.address = address.removeprefix("tcp://")
        """HOST:PORT, as others reach it."""

    @property
    def num_denied(self) -> int:
        """Connections that were turned away."""
        return self._authenticator.num_denied

    def open(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        loop = asyncio.get_running_loop()
        self._descriptors = [_descriptor(socket) for socket, _ in self._poller.sockets]
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._pump)
        self._pump_soon()

    def send(self, peer: bytes, frame: bytes) -> None:
        """Never waits: what cannot be sent is for somebody who left, or reads nothing."""
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            logger.debug("an answer went nowhere: %s", error)
        self._pump_soon()

    def close(self) -> None:
        """What was sent has a moment to leave."""
        if self._descriptors:
            loop = asyncio.get_running_loop()
            for descriptor in self._descriptors:
                loop.remove_reader(descriptor)
            self._descriptors = []
        self._authenticator.close()
        self._socket.close(LAST_WORDS_MS)
        self._context.term()

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        if not self._descriptors:
            return  # closed meanwhile
        for _ in range(_MESSAGES_AT_ONCE):
            ready = dict(self._poller.poll(0))
            if not ready:
                return
            self._authenticator.attend(ready)
            if self._socket in ready:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._on_message(peer, frames)
        self._pump_soon()


def set_heartbeats(socket: "zmq.Socket[Any]", network: NetworkConfig) -> None:
    """A connection whose other end is silent, as when its host is gone, ends (RFC 37, PING)."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(network.heartbeat_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(network.peer_timeout_s * 1000))


def _descriptor(socket: "zmq.Socket[Any]") -> int:
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
