"""The control server's socket in an event loop: admits connections and moves whole frames; knows no message."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from baton.config import NetworkConfig
from baton.messages.control_codec import MAX_MESSAGE_BYTES
from baton.system.addresses import listen
from baton.system.curve import PeerAuthenticator, PlaneKeys
from baton.system.dead_connections import end_dead_connections

logger = logging.getLogger(__name__)

MAX_CALLS_OF_ONE = 64
"""The most open calls of one connection. A gateway has a WaitView, a report, and its operators' calls."""

CLOSE_MS = 500
"""How long the last replies may take when the port is closed."""

_MESSAGES_AT_ONCE = 64
"""The most messages that are read before other tasks of the event loop run."""

OnFrames = Callable[[bytes, list[bytes]], None]
"""Called with the connection of a message, and its frames."""


class ServerSocket:
    """Binds its port in the constructor, and serves from `open` to `close`. Belongs to one event loop.

    Messages that arrive too fast first wait in bounded queues here, and then at their senders. libzmq's file
    descriptors signal a change only once. So all messages are read after each signal, and after each other use of the
    socket (zmq_getsockopt(3), ZMQ_FD).
    """

    def __init__(self, network: NetworkConfig, port: int, keys: PlaneKeys | None) -> None:
        """Port 0 picks a free port; ConfigError if the port is taken. Without `keys`, admits all peers."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Room for more than the replies to all open calls of a connection. A peer that does not read loses replies.
        self._socket.setsockopt(zmq.SNDHWM, 2 * MAX_CALLS_OF_ONE)
        self._socket.setsockopt(zmq.RCVHWM, 2 * MAX_CALLS_OF_ONE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        set_heartbeats(self._socket, network)
        self._authenticator = PeerAuthenticator("the control server", self._socket, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._authenticator.register(self._poller)
        self._descriptors: list[int] = []
        self._is_read_due = False
        try:
            address = listen(
                self._socket, network.bind_host, network.advertise_host, port, "cluster.fleet_port"
            )
        except BaseException:
            self.close()
            raise
        self.address = address.removeprefix("tcp://")
        """HOST:PORT at which others reach this server."""

    def open(self, on_frames: OnFrames) -> None:
        self._on_frames = on_frames
        loop = asyncio.get_running_loop()
        self._descriptors = [_descriptor(socket) for socket, _ in self._poller.sockets]
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._read_messages)
        self._read_soon()

    def send(self, peer: bytes, frame: bytes) -> None:
        """Sends a reply, and never waits. Drops the reply if its peer has disconnected or reads nothing."""
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            logger.debug("dropped a reply: %s", error)
        self._read_soon()

    def close(self) -> None:
        """Closes the port. Replies that are still in a queue have CLOSE_MS to be sent."""
        if self._descriptors:
            loop = asyncio.get_running_loop()
            for descriptor in self._descriptors:
                loop.remove_reader(descriptor)
            self._descriptors = []
        self._authenticator.close()
        self._socket.close(CLOSE_MS)
        self._context.term()

    def _read_soon(self) -> None:
        if not self._is_read_due:
            self._is_read_due = True
            asyncio.get_running_loop().call_soon(self._read_messages)

    def _read_messages(self) -> None:
        self._is_read_due = False
        if not self._descriptors:
            return  # closed meanwhile
        for _ in range(_MESSAGES_AT_ONCE):
            ready = dict(self._poller.poll(0))
            if not ready:
                return
            self._authenticator.attend(ready)
            if self._socket in ready:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._on_frames(peer, frames)
        self._read_soon()


def set_heartbeats(socket: "zmq.Socket[Any]", network: NetworkConfig) -> None:
    """Ends connections whose other end is silent, for example because its host is lost (RFC 37, PING)."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(network.heartbeat_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(network.peer_timeout_s * 1000))
    end_dead_connections(socket, network.peer_timeout_s)


def _descriptor(socket: "zmq.Socket[Any]") -> int:
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
