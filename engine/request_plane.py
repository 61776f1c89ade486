"""RequestServer: a worker's end of the request plane, on a thread of its own so that no step delays a heartbeat.

Turns frames into typed messages and back; knows what the messages mean only as far as who is connected.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import zmq

from baton.addresses import listen
from baton.clock import Clock
from baton.config import NetworkConfig
from baton.curve import Doorkeeper, PlaneKeys
from baton.errors import WireError
from baton.messages import TO_GATEWAY, TO_WORKER, AbortRequests, Hello, Outputs, SubmitRequest
from baton.request import EngineRequest, RequestOutput
from baton.session import WorkerSessions
from baton.wakeup import WakeUp
from baton.wire import MAX_MESSAGE_BYTES
from baton.worker import WorkerStatus

logger = logging.getLogger(__name__)

OUTBOX_MESSAGES = 100_000
"""What may wait for one gateway that does not read; past this it counts as gone."""


class RequestSink(Protocol):
    """What the server does with requests: the engine loop."""

    def submit(self, client_id: str, request: EngineRequest) -> None: ...

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None: ...

    def abort_client(self, client_id: str) -> None: ...


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
        self._outbox: queue.SimpleQueue[tuple[str, list[RequestOutput]]] = queue.SimpleQueue()
        self._wakeup = WakeUp()
        self._is_stopping = False
        self.num_bad_messages = 0

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._doorkeeper = Doorkeeper("the request plane", self._socket, keys)
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

    def stop(self) -> None:
        """Sends what is queued, then closes the port."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join()

    def _run(self, sink: RequestSink) -> None:
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
            if self._clock.now() >= next_beat:
                self._beat(sink)
                next_beat = self._clock.now() + self._network.heartbeat_interval_s
        self._send_outbox(sink)
        self._doorkeeper.close()
        self._socket.close()
        self._context.term()
        self._wakeup.close()

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
                self.num_bad_messages += 1
                logger.warning("dropped a message: %s", error)

    def _receive(self, peer: bytes, frame: bytes, sink: RequestSink) -> None:
        message = TO_WORKER.decode(frame)
        if isinstance(message, Hello):
            if gap := self._sessions.hear(peer, message, self._clock.now()):
                self._end_requests(peer, sink, gap)
            self._send_heartbeat(peer, self._status(), sink)
            return
        self._sessions.take(peer, message)
        if isinstance(message, SubmitRequest):
            sink.submit(_client_id(peer), message.request)
        elif isinstance(message, AbortRequests):
            sink.abort(_client_id(peer), message.request_ids)

    def _beat(self, sink: RequestSink) -> None:
        for peer in self._sessions.silent_for(self._network.peer_timeout_s, self._clock.now()):
            self._forget(peer, sink, "silent for too long")
        status = self._status()
        for peer in self._sessions.peers:
            self._send_heartbeat(peer, status, sink)

    def _send_heartbeat(self, peer: bytes, status: WorkerStatus, sink: RequestSink) -> None:
        self._send(peer, TO_GATEWAY.encode(self._sessions.heartbeat(peer, status)), sink)

    def _send_outbox(self, sink: RequestSink) -> None:
        while True:
            try:
                client_id, outputs = self._outbox.get_nowait()
            except queue.Empty:
                return
            peer = bytes.fromhex(client_id)
            if self._sessions.count_outputs(peer):
                self._send(peer, TO_GATEWAY.encode(Outputs(tuple(outputs))), sink)

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
