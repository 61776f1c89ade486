"""ZmqCarrier: control calls over one ZeroMQ connection, which reconnects by itself; needs no Ray."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from baton.config import BatonConfig, NetworkConfig
from baton.errors import ClusterError, WireError
from baton.messages.control_codec import (
    MAX_MESSAGE_BYTES,
    CallFrame,
    Reply,
    read_reply,
    write_call,
)
from baton.system.addresses import needs_ipv6
from baton.system.awake_timer import awake_timeout
from baton.system.curve import FAILED_HANDSHAKES, REFUSED, PlaneKeys, connection_events, secure_client
from baton.system.hosts import host_of
from baton.system.tasks import end_tasks
from cluster.control_api.calls import CallNotSent, ControlClient
from cluster.control_api.server_socket import MAX_CALLS_OF_ONE, set_heartbeats
from cluster.controller.supervisor import Patience

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
"""How long a call waits for a connection, for example while a name is looked up or a server restarts."""
ANSWER_S = 40.0
"""How long the server may take in addition to the call's own wait. A restart of the controller may take 30 s of
this."""
_TRANSIT_S = 5.0
"""Added to the server's time, for the way of the call and of the reply."""

_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2000


@asynccontextmanager
async def control_client(
    address: str, keys: PlaneKeys | None, network: NetworkConfig
) -> AsyncIterator[ControlClient]:
    """A client of the control server at HOST:PORT, connected until the `async with` ends."""
    async with ZmqCarrier(address, keys, network) as carrier:
        yield ControlClient(carrier, Patience.of(BatonConfig()))


class ZmqCarrier:
    """An async context manager around the connection. See cluster.control_api.calls.Carrier."""

    def __init__(self, address: str, keys: PlaneKeys | None, network: NetworkConfig) -> None:
        """`address` is HOST:PORT. `network` sets the heartbeats."""
        self.address = address
        self.connection = 1
        self.refusal: str | None = None
        self._keys = keys
        self._network = network
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._is_connected = False
        self._is_known = asyncio.Event()
        """Set once there is a connection or a refusal."""

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no messages are queued for an absent server
        self._socket.setsockopt(zmq.SNDHWM, MAX_CALLS_OF_ONE)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        set_heartbeats(self._socket, self._network)
        secure_client(self._socket, self._keys)
        self._monitor = self._socket.get_monitor_socket(
            FAILED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._tasks = [
            asyncio.create_task(self._connect(), name="control lookup"),
            asyncio.create_task(self._receive_replies(), name="control replies"),
            asyncio.create_task(self._watch_connection(), name="control connection"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks(*self._tasks)
        self._fail_all(f"the connection to the control server at {self.address} was closed")
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    async def exchange(self, frame: CallFrame, hangs_after_s: float | None = None) -> Reply:  # noqa: ARG002
        """The reply. CallNotSent if there is no connection; ClusterError if it breaks, or no reply comes in time."""
        await self._until_connected()
        timeout_s = frame.timeout_s + ANSWER_S
        message = write_call(replace(frame, timeout_s=timeout_s))
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[frame.number] = reply
        try:
            async with awake_timeout(timeout_s + _TRANSIT_S):
                await self._send(message)
                return await reply
        except TimeoutError:
            raise ClusterError(
                f"the control server at {self.address} did not answer for {timeout_s + _TRANSIT_S:g} s"
            ) from None
        finally:
            del self._waiting[frame.number]
            reply.cancel()

    async def _send(self, message: bytes) -> None:
        try:
            await self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            raise CallNotSent(
                f"the control server at {self.address} accepts no more calls at present; try again later"
            ) from None

    async def _until_connected(self) -> None:
        with suppress(TimeoutError):
            async with awake_timeout(CONNECT_S):
                await self._is_known.wait()
        if not self._is_connected:
            why = self.refusal or f"no answer for {CONNECT_S:g} s"
            raise CallNotSent(f"no connection to the control server at {self.address}: {why}")

    async def _connect(self) -> None:
        """Connects as soon as the server's name is known, for example to the DNS of a cluster that has just begun."""
        while (is_ipv6 := await needs_ipv6(host_of(self.address))) is None:  # noqa: ASYNC110 - DNS has no events
            await asyncio.sleep(_RECONNECT_MAX_MS / 1000)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        self._socket.connect(f"tcp://{self.address}")

    async def _receive_replies(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"expected one frame, got {len(frames)}")
                reply = read_reply(frames[0])
            except WireError as error:
                logger.warning("dropped a bad message from the control server: %s", error)
                continue
            waiting = self._waiting.get(reply.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)

    async def _watch_connection(self) -> None:
        async for event in connection_events(self._monitor):
            match event:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.refusal = None
                    self._is_connected = True
                    self._is_known.set()
                case zmq.EVENT_DISCONNECTED:
                    self._is_connected = False
                    self.connection += 1
                    if self.refusal is None:
                        self._is_known.clear()
                    self._fail_all(f"the connection to the control server at {self.address} broke")
                case _:
                    self.refusal = REFUSED
                    self._is_known.set()

    def _fail_all(self, reason: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ClusterError(reason))
