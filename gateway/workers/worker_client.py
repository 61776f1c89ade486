"""WorkerClient: a gateway's end of the request plane to one worker; knows messages, not requests."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress

import zmq
import zmq.asyncio

from baton.config import NetworkConfig
from baton.errors import WireError
from baton.messages.request_plane import (
    REQUEST_PLANE_VERSION,
    TO_GATEWAY,
    TO_WORKER,
    Heartbeat,
    KVEvents,
    Outputs,
    SessionCommand,
    ToGateway,
    foreign_version,
)
from baton.messages.session import GatewaySession
from baton.messages.wire import MAX_MESSAGE_BYTES
from baton.request import EngineRequest, RequestOutput
from baton.system.adaptive_timeout import AdaptiveTimeout
from baton.system.addresses import connect
from baton.system.awake_timer import AwakeTimer
from baton.system.curve import FAILED_HANDSHAKES, REFUSED, PlaneKeys, connection_events, secure_client
from baton.system.dead_connections import end_dead_connections
from baton.system.standstill import Standstill, pace_of
from baton.worker import WorkerEndpoint, WorkerRole, WorkerState, WorkerStatus
from gateway.turn_budget import SharedTurns
from gateway.workers.worker_listener import UNCOUNTED, LossCause, WorkerListener

logger = logging.getLogger(__name__)

MAX_FRAMES_AT_ONCE = 32
"""At most this many frames are read at once."""
OUTPUTS_AT_ONCE = 16
"""At most this many outputs are one portion of work (see SharedTurns). A portion takes about 1 ms, or 10 ms with all
log-probabilities."""

READING_S = 0.05
"""Time to read pending input before a worker counts as silent."""


Loss = tuple[LossCause, str]
"""A cause, and the reason in words."""


class WorkerClient:
    """Exchanges messages with one incarnation of one worker until this incarnation ends."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        context: zmq.asyncio.Context,
        gateway_id: str,
        connection_number: int,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        listener: WorkerListener,
        losses: Counter[LossCause],
        turns: SharedTurns,
    ) -> None:
        """`gateway_id`: in hex. Counts every loss of this worker in `losses`. `turns`: shared by the clients of all
        workers."""
        self.endpoint = endpoint
        self.status: WorkerStatus | None = None
        """The status in the latest heartbeat; None before the first heartbeat."""
        self.first_sign = asyncio.Event()
        """Set at the first heartbeat, or when the worker is lost before it."""
        self.refusal: str | None = None
        """Why one side refuses the other: a different secret or version. Only a restart can end this."""
        self.num_bad_messages = 0
        self._network = network
        self._listener = listener
        self._losses = losses
        self._turns = turns
        self._session = GatewaySession(endpoint.ref.incarnation, gateway_id, connection_number)
        self.is_lost = False
        """True from a loss of the worker until its next heartbeat. Meanwhile it gets no requests."""
        self._is_connected = True
        """False from the break of the connection until it is restored. Before the first connection, only silence shows
        a loss."""
        self._grace: AwakeTimer | None = None
        """Runs while a broken connection may still be restored."""
        self._timeout = AdaptiveTimeout(network.peer_timeout_s)
        self._check_every_s = pace_of(self._timeout.least_s) / 2
        self._standstill = Standstill(2 * self._check_every_s)
        self._received_at = 0.0
        """When the latest messages arrived or, later, were handled; on a clock that excludes standstills of this
        process."""
        self._is_reading = True
        """False while messages wait for a turn. No heartbeat is read then, so this is no silence."""
        self._socket = context.socket(zmq.DEALER)
        # An identity for each connection. A worker that restarts on its own port may accept the old connection, which
        # libzmq restores, after the new one. If both had the same identity, the old connection would take the place of
        # the new connection, and end with its socket. Then libzmq would never read the new connection.
        self._socket.setsockopt(zmq.IDENTITY, bytes.fromhex(gateway_id) + connection_number.to_bytes(8))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        end_dead_connections(self._socket, network.peer_timeout_s)
        secure_client(self._socket, keys)
        # This must come before `connect`, since libzmq reports some refusals only once, and does not retry.
        self._connection = self._socket.get_monitor_socket(
            FAILED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        connect(self._socket, endpoint.request_address)

    @property
    def name(self) -> str:
        return self.endpoint.ref.name

    async def run(self) -> Loss:
        """Exchanges heartbeats and passes on outputs until this incarnation of the worker ends; returns why.

        Silence does not end `run`: a worker that was stopped, or cut off from the network, may continue
        later.
        """
        self._received_at = self._running_s()
        tasks = [
            asyncio.create_task(work)
            for work in (self._greet(), self._watch_connection(), self._watch_silence())
        ]
        try:
            return await self._listen()
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    def close(self) -> None:
        """Stops all messages. May be called more than once, and before `run`."""
        if self._socket.closed:
            return
        self._end_grace()
        self.first_sign.set()
        self._socket.disable_monitor()
        self._connection.close()
        self._socket.close()

    @property
    def role(self) -> WorkerRole:
        """The role in the latest heartbeat: a worker may change its role."""
        return self.endpoint.role if self.status is None else self.status.role

    @property
    def state(self) -> WorkerState:
        """The state in the latest heartbeat; DEAD if the worker is lost."""
        if self.is_lost:
            return WorkerState.DEAD
        return WorkerState.STARTING if self.status is None else self.status.state

    def lose(self, cause: LossCause, reason: str) -> None:
        """Reports and counts a loss of the worker's requests. Further signs of the same loss have no effect."""
        if self.is_lost:
            return
        self.is_lost = True
        self.first_sign.set()
        if cause not in UNCOUNTED:
            self._losses[cause] += 1
        self._listener.on_worker_lost(self.name, cause, reason)

    def submit(self, request: EngineRequest) -> None:
        self._send_command(self._session.submit(request))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Ends requests that were submitted over this connection. Requests of an earlier connection ended
        with it."""
        if self._session.number is None:
            return  # nothing was submitted
        self._send_command(self._session.abort(request_ids))

    def subscribe_kv_events(self) -> None:
        """Subscribes to the content and changes of the worker's prefix cache. Call this again after a gap, and in
        a new session."""
        if self._session.number is not None:
            self._send_command(self._session.subscribe_kv_events())

    async def _greet(self) -> None:
        while True:
            self._send(TO_WORKER.encode(self._session.hello()))
            await asyncio.sleep(self._network.heartbeat_interval_s)

    async def _watch_connection(self) -> None:
        async for event in connection_events(self._connection):
            match event:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.refusal = None
                    self._is_connected = True
                    self._end_grace()
                case zmq.EVENT_DISCONNECTED:
                    self._begin_grace()
                case zmq.EVENT_CLOSED:  # an attempt to connect failed
                    if self._grace is not None:
                        self._note_disconnection("and its port refuses a new connection")
                case _:
                    self._refuse(REFUSED)

    def _begin_grace(self) -> None:
        """Gives libzmq time to reconnect, which it does after 0.1 to 0.2 s. The port of a killed process refuses the
        attempt."""
        if self._grace is None:
            grace_s = self._network.reconnect_grace_s
            reason = f"and was not restored within {grace_s:g} s"
            self._grace = AwakeTimer(grace_s, lambda: self._note_disconnection(reason))

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _note_disconnection(self, reason: str) -> None:
        self._end_grace()
        self._is_connected = False
        self.lose(LossCause.DISCONNECTED, f"its connection broke, {reason}")

    async def _watch_silence(self) -> None:
        """Notices silence. A standstill of this process does not count, and pending input is read first."""
        while True:
            left_s = self._patience_left_s()
            if left_s <= 0.0 and not self.is_lost:
                await asyncio.sleep(READING_S)
                if self._patience_left_s() <= 0.0:
                    self.lose(LossCause.SILENT, f"silent for {self._silent_s():.1f} s")
            await asyncio.sleep(min(left_s, self._check_every_s) if left_s > 0.0 else self._check_every_s)

    def _patience_left_s(self) -> float:
        return self._timeout.limit_s(self._running_s()) - self._silent_s()

    def _silent_s(self) -> float:
        return self._running_s() - self._received_at if self._is_reading else 0.0

    def _running_s(self) -> float:
        return self._standstill.running(asyncio.get_running_loop().time())

    async def _listen(self) -> Loss:
        while True:
            await self._socket.poll()
            frames = await self._frames()
            if frames:
                self._timeout.on_message(self._silent_s(), self._running_s())
                self._received_at = self._running_s()
            self._is_reading = False
            if loss := await self._handle(frames):
                return loss
            self._received_at = self._running_s()
            self._is_reading = True

    async def _handle(self, frames: list[bytes]) -> Loss | None:
        """Handles messages, in turns: to decode a message of 256 outputs takes 1 ms, or 7 ms with 20 log-probabilities
        each. Returns why the worker is lost, if a message shows this."""
        outputs: list[RequestOutput] = []
        for frame in frames:
            async with self._turns:
                message = self._decode(frame)
                if isinstance(message, KVEvents) and not self.is_lost:  # events of a lost session are void
                    self._listener.on_kv_events(self.name, message)
            match message:
                case Outputs(more):
                    self._session.note_outputs()
                    outputs += more
                case Heartbeat() as heartbeat:
                    await self._pass_on(outputs)
                    if loss := self._on_heartbeat(heartbeat):
                        return loss
        await self._pass_on(outputs)
        return None

    async def _frames(self) -> list[bytes]:
        """The available frames, at most MAX_FRAMES_AT_ONCE."""
        frames: list[bytes] = []
        with suppress(zmq.Again):
            while len(frames) < MAX_FRAMES_AT_ONCE:
                frames.append(await self._socket.recv(flags=zmq.NOBLOCK))
        return frames

    async def _pass_on(self, outputs: list[RequestOutput]) -> None:
        """Passes the outputs on, and empties the list. The outputs of one request are passed on together, so
        a busy gateway sends them together and has less work."""
        by_request = sorted(outputs, key=lambda output: output.request_id)
        outputs.clear()
        for begin in range(0, len(by_request), OUTPUTS_AT_ONCE):
            async with self._turns:
                self._listener.on_outputs(self.name, tuple(by_request[begin : begin + OUTPUTS_AT_ONCE]))

    def _decode(self, frame: bytes) -> ToGateway | None:
        """The message; None if it is invalid, or of another version."""
        try:
            message = TO_GATEWAY.decode(frame)
        except WireError as error:
            if (version := foreign_version(frame)) is not None:
                self._refuse(
                    f"it uses version {version} of the request plane, this gateway "
                    f"{REQUEST_PLANE_VERSION}; run the same version of Baton on both"
                )
            else:
                self.num_bad_messages += 1
                logger.warning("dropped a message from worker %s: %s", self.name, error)
            return None
        return message

    def _refuse(self, reason: str) -> None:
        if self.refusal is None:
            self.refusal = reason
            self.lose(LossCause.REFUSED, reason)

    def _on_heartbeat(self, message: Heartbeat) -> Loss | None:
        """Handles a heartbeat. Returns why the worker is lost, if the heartbeat shows this."""
        if message.status.ref.incarnation != self.endpoint.ref.incarnation:
            return LossCause.RESTARTED, "restarted"
        if reason := self._session.note_heartbeat(message):
            self.lose(LossCause.SESSION_LOST, reason)
        if self._session.number is None:
            return None  # the worker has opened no session
        was_draining = self.status is not None and self.status.state is WorkerState.DRAINING
        self.status = message.status
        self.first_sign.set()
        if message.status.state.has_ended:
            return _end_of(message.status, was_draining)
        # While the connection is broken, only old messages arrive. They do not show that the worker is alive.
        self.is_lost = not self._is_connected
        if not self.is_lost:
            self._listener.on_status(message.status)
            for command in self._session.run_named(message.status):
                self._send_command(command)
        return None

    def _send_command(self, command: SessionCommand) -> None:
        frame = TO_WORKER.encode(command)
        self._session.count_command()
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        try:
            sent = self._socket.send(
                frame, zmq.NOBLOCK
            )  # when `send` returns, the frame is sent or has failed
            assert isinstance(sent, asyncio.Future)
            sent.result()
        except zmq.ZMQError as error:
            # The queue is full or the socket is closed. `_listen` will notice, or the worker at the next
            # Hello.
            logger.warning("could not send to worker %s: %s", self.name, error)


def _end_of(status: WorkerStatus, was_draining: bool) -> Loss:
    match status.state:
        case WorkerState.HUNG:
            cause = LossCause.HUNG
        case WorkerState.STOPPED if was_draining:
            cause = LossCause.LEFT
        case _:
            cause = LossCause.ENDED
    reason = f"its engine is {status.state.value}"
    return cause, f"{reason}: {status.failure}" if status.failure else reason
