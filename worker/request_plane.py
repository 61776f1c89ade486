"""RequestServer: a worker's end of the request plane, on a thread of its own so that no step delays a heartbeat.

Turns frames into typed messages and back; knows which gateways are connected and which suspects run, but not what other
messages mean.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import zmq

from baton.clock import Clock
from baton.config import NetworkConfig
from baton.errors import WireError
from baton.messages.request_plane import (
    REQUEST_PLANE_VERSION,
    TO_GATEWAY,
    TO_WORKER,
    AbortRequests,
    Hello,
    KVEvents,
    Outputs,
    RunSuspect,
    SubmitRequest,
    SubscribeKVEvents,
    foreign_version,
)
from baton.messages.session import WorkerSessions
from baton.messages.wire import MAX_MESSAGE_BYTES
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.system.addresses import listen
from baton.system.curve import PeerAuthenticator, PlaneKeys
from baton.system.dead_connections import end_dead_connections
from baton.system.progress import Progress
from baton.system.standstill import Standstill, pace_of
from baton.system.wakeup import WakeUp
from baton.worker import WorkerState, WorkerStatus
from worker.client_requests import last_output
from worker.kv_events import KVChange, split_change
from worker.suspect_turns import SuspectTurns

logger = logging.getLogger(__name__)

OUTBOX_MESSAGES = 100_000
"""The most messages that wait for a gateway that does not read. If there are more, the gateway counts as lost."""

MAX_MESSAGES_PER_TURN = 64
"""The most messages that are read in one turn: a gateway that never stops sending must not delay outputs and
heartbeats."""

PROGRESS_TIMEOUT_S = 60.0
"""The longest time for one turn of the thread's loop. After that, the request plane counts as hung; the worker ends."""

_DISCONNECTED = "disconnected"

FLUSH_TIMEOUT_MS = 500
"""The longest wait for the last messages to be sent before the port is closed."""


class EngineCommands(Protocol):
    """What gateways may make the engine do; EngineLoop does it, between two steps."""

    def submit(self, client_id: str, request: EngineRequest) -> None: ...

    def decline(self, request: EngineRequest) -> None:
        """Tells the engine of a request that was refused before it reached the engine."""
        ...

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None: ...

    def abort_client(self, client_id: str) -> None: ...

    def subscribe_kv_events(self, client_id: str) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Tells the engine that the request plane has failed for good."""
        ...


@dataclass(frozen=True, slots=True)
class _KVUpdate:
    client_ids: tuple[str, ...]
    change: KVChange


class RequestServer:
    """Listens for gateways. A gateway's session begins with its Hello.

    The session ends when the gateway is silent for `peer_timeout_s`, is unreachable, does not read, or has connected
    anew. It also ends when a command of the gateway was lost. Then the session's requests end, and the gateway's next
    Hello opens a new session.
    """

    def __init__(
        self,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        incarnation: str,
        status: Callable[[], WorkerStatus],
        clock: Clock,
    ) -> None:
        """Without `keys`, every process that can connect is served."""
        self._network = network
        self._engine_status = status
        self._suspects = SuspectTurns()
        self._clock = clock
        self.progress = Progress("its request plane", clock, PROGRESS_TIMEOUT_S)
        self._sessions = WorkerSessions(incarnation)
        self._standstill = Standstill(pace_of(network.peer_timeout_s, network.heartbeat_interval_s))
        self._outbox: queue.SimpleQueue[tuple[str, list[RequestOutput]] | _KVUpdate] = queue.SimpleQueue()
        self._is_beat_due = threading.Event()
        self._wakeup = WakeUp()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._engine: EngineCommands
        """Set by `start`."""
        self.num_bad_messages = 0
        self.num_foreign_hellos = 0
        """Hellos of gateways with another version."""

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        end_dead_connections(self._socket, network.peer_timeout_s)
        self._authenticator = PeerAuthenticator("the request plane", self._socket, keys)
        self.address = listen(self._socket, network.bind_host, network.advertise_host)

    @property
    def num_denied(self) -> int:
        """Number of refused connections; readable from any thread."""
        return self._authenticator.num_denied

    def start(self, engine: EngineCommands) -> None:
        self._engine = engine
        thread = threading.Thread(target=self._run, name="request-plane", daemon=True)
        thread.start()
        self._thread = thread

    def send(self, client_id: str, outputs: list[RequestOutput]) -> None:
        """Queues outputs for a gateway; from any thread, never blocks."""
        self._outbox.put((client_id, outputs))
        self._wakeup.set()

    def send_kv_change(self, client_ids: tuple[str, ...], change: KVChange) -> None:
        """Queues changes of the prefix cache for subscribed gateways; from any thread, never blocks."""
        self._outbox.put(_KVUpdate(client_ids, change))
        self._wakeup.set()

    def beat(self) -> None:
        """Makes the thread send a heartbeat to every gateway now; from any thread, never blocks."""
        self._is_beat_due.set()
        self._wakeup.set()

    def stop(self) -> None:
        """Sends queued messages and a last status, then closes the port. May be called before `start`."""
        self._is_stopping = True
        if self._thread is None:
            self._close()
            return
        self._wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # nothing else catches this: an unreachable worker must end
            logger.exception("the request plane failed")
            self._engine.fail(error)
            self._report_failure(error)
        finally:
            self._close()
            self.progress.end()

    def _close(self) -> None:
        self._authenticator.close()
        self._socket.close(FLUSH_TIMEOUT_MS)
        self._context.term()
        self._wakeup.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._authenticator.register(poller)
        next_beat = self._clock.now()
        while not self._is_stopping:
            self.progress.end()
            ready = dict(poller.poll(max(0, math.ceil((next_beat - self._clock.now()) * 1000))))
            self.progress.begin()
            self._wakeup.clear()
            self._authenticator.attend(ready)
            self._send_outbox()
            self._receive_some()
            if self._clock.now() >= next_beat or self._is_beat_due.is_set():
                self._is_beat_due.clear()
                self._beat()
                next_beat = self._clock.now() + self._network.heartbeat_interval_s
        self._send_outbox()
        self._beat()

    def _report_failure(self, error: BaseException) -> None:
        """Notifies gateways of the failure at once, so that they need not wait for a timeout."""
        try:
            status = replace(
                self._status(), state=WorkerState.DEAD, failure=f"its request plane failed: {error}"
            )
            for peer in self._sessions.peers:
                frame = TO_GATEWAY.encode(self._sessions.heartbeat(peer, status))
                self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except Exception as last_error:  # the cause of the failure may affect this, too
            logger.debug("could not report the failure of the request plane: %s", last_error)

    def _receive_some(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"expected one frame, got {len(frames)}")
                self._receive(peer, frames[0])
            except WireError as error:
                if len(frames) == 1 and (version := foreign_version(frames[0])) is not None:
                    self._refuse(peer, version)
                    continue
                self.num_bad_messages += 1
                logger.warning("dropped a message: %s", error)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        message = TO_WORKER.decode(frame)
        if isinstance(message, Hello):
            if ended := self._sessions.on_hello(peer, message, self._running_s()):
                self._end_requests(ended.peer, ended.reason)
            self._send_heartbeat(peer, self._status_after_outputs())
            return
        self._sessions.count_command(peer, message)
        match message:
            case SubmitRequest(request):
                extra = {"engine_request_id": request.request_id}
                logger.debug("received request %s", request.request_id, extra=extra)
                if request.is_suspect:
                    self._begin_turn(peer, request)
                else:
                    self._engine.submit(_client_id(peer), request)
            case RunSuspect(request_id):
                if suspect := self._suspects.release(_client_id(peer), request_id):
                    self._engine.submit(_client_id(peer), suspect)
            case AbortRequests(request_ids):
                if dropped := self._drop_suspects(peer, request_ids):
                    self.send(_client_id(peer), [last_output(suspect) for suspect in dropped])
                self._engine.abort(_client_id(peer), request_ids)
            case SubscribeKVEvents():
                self._engine.subscribe_kv_events(_client_id(peer))

    def _begin_turn(self, peer: bytes, suspect: EngineRequest) -> None:
        """Begins a suspect's turn and notifies the gateways, or refuses the suspect."""
        refused = self._suspects.begin(_client_id(peer), suspect, self._running_s())
        if refused is not None:
            self._engine.decline(suspect)
            self.send(_client_id(peer), [refused])
        else:
            self._beat()

    def _drop_suspects(self, peer: bytes, request_ids: tuple[str, ...] | None = None) -> list[EngineRequest]:
        """Drops held suspects, which the engine does not know."""
        dropped = self._suspects.drop(_client_id(peer), request_ids, self._running_s())
        for suspect in dropped:
            self._engine.decline(suspect)
        if dropped:
            self._is_beat_due.set()  # another suspect may wait for its turn
        return dropped

    def _refuse(self, peer: bytes, version: int) -> None:
        """Opens no session for a gateway of another version; sends it a heartbeat that tells our version."""
        self.num_foreign_hellos += 1
        if self.num_foreign_hellos.bit_count() == 1:  # 1, 2, 4, 8, ...: it keeps retrying
            logger.warning(
                "refused gateway %s: it uses version %d of the request plane, this worker %d; run the "
                "same version of Baton on both",
                peer.hex(),
                version,
                REQUEST_PLANE_VERSION,
            )
        self._send_heartbeat(peer, self._status())

    def _beat(self) -> None:
        for peer in self._sessions.silent_for(self._network.peer_timeout_s, self._running_s()):
            self._forget(peer, "silent for too long")
        status = self._status_after_outputs()
        for peer in self._sessions.peers:
            self._send_heartbeat(peer, status)

    def _status_after_outputs(self) -> WorkerStatus:
        """The status to send next. First sends the outputs that precede it: after the status of an engine that has
        ended, no output counts."""
        status = self._engine_status()
        self._send_outbox()  # this may end suspects' turns
        return self._with_suspects(status)

    def _status(self) -> WorkerStatus:
        return self._with_suspects(self._engine_status())

    def _with_suspects(self, status: WorkerStatus) -> WorkerStatus:
        suspects, is_free = self._suspects.running(), self._suspects.is_free(self._running_s())
        return replace(status, suspects=suspects, takes_suspects=is_free)

    def _running_s(self) -> float:
        """The clock for the silence of gateways. It excludes standstills of this process."""
        return self._standstill.running(self._clock.now())

    def _send_heartbeat(self, peer: bytes, status: WorkerStatus) -> None:
        self._send(peer, TO_GATEWAY.encode(self._sessions.heartbeat(peer, status)))

    def _send_outbox(self) -> None:
        while True:
            try:
                item = self._outbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _KVUpdate):
                self._send_kv_change(item)
                continue
            client_id, outputs = item
            peer = bytes.fromhex(client_id)
            for frame in self._frames(client_id, outputs):
                if self._sessions.count_outputs(peer):
                    self._send(peer, frame)
            if self._suspects.end_turns(outputs, self._running_s()):
                self._is_beat_due.set()  # another suspect may wait for its turn

    def _frames(self, client_id: str, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Encodes outputs in as few messages as possible. An output that is too large ends its request."""
        try:
            yield TO_GATEWAY.encode(Outputs(tuple(outputs)))
        except WireError as error:
            if len(outputs) > 1:
                half = len(outputs) // 2
                yield from self._frames(client_id, outputs[:half])
                yield from self._frames(client_id, outputs[half:])
                return
            request_id = outputs[0].request_id
            logger.error("ending request %s: %s", request_id, error, extra={"engine_request_id": request_id})
            self._engine.abort(client_id, (request_id,))
            yield TO_GATEWAY.encode(Outputs((_too_large(outputs[0], error),)))

    def _send_kv_change(self, update: _KVUpdate) -> None:
        for part in split_change(update.change):
            for peer in map(bytes.fromhex, update.client_ids):
                number = self._sessions.number_kv_events(peer, part.is_anew)
                if number is not None:
                    events = KVEvents(number, part.is_anew, part.removed, part.stored)
                    self._send(peer, TO_GATEWAY.encode(events))

    def _send(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            self._forget(peer, f"the gateway does not read; {OUTBOX_MESSAGES} messages wait")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer, _DISCONNECTED)

    def _forget(self, peer: bytes, why: str) -> None:
        if self._sessions.end(peer):
            self._end_requests(peer, why)

    def _end_requests(self, peer: bytes, why: str) -> None:
        # A disconnection is usual after a drain: a gateway disconnects from a drained worker.
        level = logging.INFO if why == _DISCONNECTED else logging.WARNING
        logger.log(level, "the session on connection %s ended (%s)", peer.hex(), why)
        self._drop_suspects(peer)
        self._engine.abort_client(_client_id(peer))


def _client_id(peer: bytes) -> str:
    """The gateway's ZMQ identity in hexadecimal digits: a gateway may choose any bytes."""
    return peer.hex()


def _too_large(output: RequestOutput, error: WireError) -> RequestOutput:
    return RequestOutput(
        request_id=output.request_id,
        first_position=output.first_position,
        finish_reason=FinishReason.ERROR,
        error=f"its output is too large to send: {error}",
        error_kind=ErrorKind.INTERNAL,
    )
