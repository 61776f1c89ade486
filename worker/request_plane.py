"""RequestServer: a worker's end of the request plane, on a thread of its own so that no step delays a heartbeat.

Turns frames into typed messages and back; knows what the messages mean only as far as who is connected.
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
    SubmitRequest,
    SubscribeKVEvents,
    foreign_version,
)
from baton.messages.session import WorkerSessions
from baton.messages.wire import MAX_MESSAGE_BYTES
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.system.addresses import listen
from baton.system.curve import PeerAuthenticator, PlaneKeys
from baton.system.standstill import Standstill, pace_of
from baton.system.wakeup import WakeUp
from baton.worker import WorkerState, WorkerStatus
from worker.kv_events import KVChange, parts

logger = logging.getLogger(__name__)

OUTBOX_MESSAGES = 100_000
"""What may wait for one gateway that does not read; past this it counts as gone."""

LAST_WORDS_MS = 500
"""What the last messages get to leave before the port is closed."""


class RequestSink(Protocol):
    """What the server does with requests: the engine loop."""

    def submit(self, client_id: str, request: EngineRequest) -> None: ...

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None: ...

    def abort_client(self, client_id: str) -> None: ...

    def subscribe_kv_events(self, client_id: str) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Nobody can be talked to any more."""
        ...


@dataclass(frozen=True, slots=True)
class _KVNews:
    client_ids: tuple[str, ...]
    change: KVChange


class RequestServer:
    """Listens for gateways. A gateway has a session from its Hello until it is silent for `peer_timeout_s`, out of
    reach, or has said what did not arrive; then its requests end, and the next Hello opens another.
    """

    def __init__(
        self,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        incarnation: str,
        status: Callable[[], WorkerStatus],
        clock: Clock,
    ) -> None:
        """Without `keys`, everybody who can connect is served."""
        self._network = network
        self._status = status
        self._clock = clock
        self._sessions = WorkerSessions(incarnation)
        self._standstill = Standstill(pace_of(network.peer_timeout_s, network.heartbeat_interval_s))
        self._outbox: queue.SimpleQueue[tuple[str, list[RequestOutput]] | _KVNews] = queue.SimpleQueue()
        self._is_beat_due = threading.Event()
        self._wakeup = WakeUp()
        self._is_stopping = False
        self.num_bad_messages = 0
        self.num_foreign_hellos = 0
        """From gateways that speak another version."""

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._doorkeeper = PeerAuthenticator("the request plane", self._socket, keys)
        self.address = listen(self._socket, network.bind_host, network.advertise_host)

    @property
    def num_denied(self) -> int:
        """Connections that were turned away; from any thread."""
        return self._doorkeeper.num_denied

    def start(self, sink: RequestSink) -> None:
        self._thread = threading.Thread(target=self._run, args=(sink,), name="request-plane", daemon=True)
        self._thread.start()

    def send(self, client_id: str, outputs: list[RequestOutput]) -> None:
        """Queues outputs for a gateway; from any thread, never blocks."""
        self._outbox.put((client_id, outputs))
        self._wakeup.set()

    def send_kv_change(self, client_ids: tuple[str, ...], change: KVChange) -> None:
        """Queues what changed in the prefix cache for gateways that have subscribed; from any thread, never blocks."""
        self._outbox.put(_KVNews(client_ids, change))
        self._wakeup.set()

    def beat(self) -> None:
        """Lets every gateway know at once how the worker stands; from any thread, never blocks."""
        self._is_beat_due.set()
        self._wakeup.set()

    def stop(self) -> None:
        """Sends what is queued and how the worker stands, then closes the port."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join()

    def _run(self, sink: RequestSink) -> None:
        try:
            self._serve(sink)
        except Exception as error:  # the edge of the thread: a worker that nobody can talk to must not go on
            logger.exception("the request plane ended")
            sink.fail(error)
            self._say_last(error)
        finally:
            self._doorkeeper.close()
            self._socket.close(LAST_WORDS_MS)
            self._context.term()
            self._wakeup.close()

    def _serve(self, sink: RequestSink) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._doorkeeper.register(poller)
        next_beat = self._clock.now()
        while not self._is_stopping:
            ready = dict(poller.poll(max(0, math.ceil((next_beat - self._clock.now()) * 1000))))
            self._wakeup.clear()
            self._doorkeeper.attend(ready)
            self._send_outbox(sink)
            self._receive_all(sink)
            if self._clock.now() >= next_beat or self._is_beat_due.is_set():
                self._is_beat_due.clear()
                self._beat(sink)
                next_beat = self._clock.now() + self._network.heartbeat_interval_s
        self._send_outbox(sink)
        self._beat(sink)

    def _say_last(self, error: Exception) -> None:
        """Gateways need not wait until they notice the silence."""
        try:
            status = replace(
                self._status(), state=WorkerState.DEAD, failure=f"its request plane ended: {error}"
            )
            for peer in self._sessions.peers:
                frame = TO_GATEWAY.encode(self._sessions.heartbeat(peer, status))
                self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except Exception as last_error:  # whatever was broken is broken for this, too
            logger.debug("nor could it say so: %s", last_error)

    def _receive_all(self, sink: RequestSink) -> None:
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"expected one frame, got {len(frames)}")
                self._receive(peer, frames[0], sink)
            except WireError as error:
                if len(frames) == 1 and (version := foreign_version(frames[0])) is not None:
                    self._refuse(peer, version, sink)
                    continue
                self.num_bad_messages += 1
                logger.warning("dropped a message: %s", error)

    def _receive(self, peer: bytes, frame: bytes, sink: RequestSink) -> None:
        message = TO_WORKER.decode(frame)
        if isinstance(message, Hello):
            if gap := self._sessions.hear(peer, message, self._running_s()):
                self._end_requests(peer, sink, gap)
            self._send_heartbeat(peer, self._status(), sink)
            return
        self._sessions.take(peer, message)
        match message:
            case SubmitRequest(request):
                extra = {"engine_request_id": request.request_id}
                logger.debug("request %s comes", request.request_id, extra=extra)
                sink.submit(_client_id(peer), request)
            case AbortRequests(request_ids):
                sink.abort(_client_id(peer), request_ids)
            case SubscribeKVEvents():
                sink.subscribe_kv_events(_client_id(peer))

    def _refuse(self, peer: bytes, version: int, sink: RequestSink) -> None:
        """It gets no session; our own version is all that it can read for certain."""
        self.num_foreign_hellos += 1
        if self.num_foreign_hellos.bit_count() == 1:  # 1, 2, 4, 8, ...: it goes on trying
            logger.warning(
                "refused gateway %s: it speaks version %d of the request plane, this worker %d; let both run the same "
                "version of Baton",
                peer.hex(),
                version,
                REQUEST_PLANE_VERSION,
            )
        self._send_heartbeat(peer, self._status(), sink)

    def _beat(self, sink: RequestSink) -> None:
        for peer in self._sessions.silent_for(self._network.peer_timeout_s, self._running_s()):
            self._forget(peer, sink, "silent for too long")
        status = self._status()
        for peer in self._sessions.peers:
            self._send_heartbeat(peer, status, sink)

    def _running_s(self) -> float:
        """What the silence of gateways is measured in: time in which this process stood still is not theirs."""
        return self._standstill.running(self._clock.now())

    def _send_heartbeat(self, peer: bytes, status: WorkerStatus, sink: RequestSink) -> None:
        self._send(peer, TO_GATEWAY.encode(self._sessions.heartbeat(peer, status)), sink)

    def _send_outbox(self, sink: RequestSink) -> None:
        while True:
            try:
                news = self._outbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(news, _KVNews):
                self._send_kv_change(news, sink)
                continue
            client_id, outputs = news
            peer = bytes.fromhex(client_id)
            for frame in self._frames(client_id, outputs, sink):
                if self._sessions.count_outputs(peer):
                    self._send(peer, frame, sink)

    def _frames(self, client_id: str, outputs: list[RequestOutput], sink: RequestSink) -> Iterator[bytes]:
        """As few messages as hold them all. One output that none can hold ends its request."""
        try:
            yield TO_GATEWAY.encode(Outputs(tuple(outputs)))
        except WireError as error:
            if len(outputs) > 1:
                half = len(outputs) // 2
                yield from self._frames(client_id, outputs[:half], sink)
                yield from self._frames(client_id, outputs[half:], sink)
                return
            request_id = outputs[0].request_id
            logger.error("request %s ends: %s", request_id, error, extra={"engine_request_id": request_id})
            sink.abort(client_id, (request_id,))
            yield TO_GATEWAY.encode(Outputs((_too_large(outputs[0], error),)))

    def _send_kv_change(self, news: _KVNews, sink: RequestSink) -> None:
        for part in parts(news.change):
            for peer in map(bytes.fromhex, news.client_ids):
                number = self._sessions.number_kv_events(peer, part.is_anew)
                if number is not None:
                    events = KVEvents(number, part.is_anew, part.removed, part.stored)
                    self._send(peer, TO_GATEWAY.encode(events), sink)

    def _send(self, peer: bytes, frame: bytes, sink: RequestSink) -> None:
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            self._forget(peer, sink, f"does not read, {OUTBOX_MESSAGES} messages wait for it")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer, sink, "disconnected")

    def _forget(self, peer: bytes, sink: RequestSink, why: str) -> None:
        if self._sessions.end(peer):
            self._end_requests(peer, sink, why)

    def _end_requests(self, peer: bytes, sink: RequestSink, why: str) -> None:
        logger.warning("the session of gateway %s is over (%s), its requests end", peer.hex(), why)
        sink.abort_client(_client_id(peer))


def _client_id(peer: bytes) -> str:
    """Gateways choose their ZMQ identity; hex keeps any bytes printable."""
    return peer.hex()


def _too_large(output: RequestOutput, error: WireError) -> RequestOutput:
    return RequestOutput(
        request_id=output.request_id,
        first_position=output.first_position,
        finish_reason=FinishReason.ERROR,
        error=f"what it brought cannot be sent: {error}",
        error_kind=ErrorKind.INTERNAL,
    )
