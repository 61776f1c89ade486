"""EngineLoop: the thread that owns an EngineCore; takes commands, steps while there is work, sleeps when there is none.

Knows the role on top and hands outputs to whoever was given to it; knows no socket.
"""

import heapq
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.clock import Clock
from baton.errors import InvalidRequest, Overloaded, RequestError
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole
from engine.core import ClientOutputs, EngineCore
from engine.role import Role
from scheduler import RequestStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """How the engine stood after its last step; replaced whole, so any thread may read it."""

    role: WorkerRole
    is_draining: bool
    is_drained: bool
    kv_blocks: KVBlockCounts
    requests: RequestCounts
    counters: dict[str, int]


class Outbox(Protocol):
    """Where outputs go; must not block, since it is called between two steps."""

    def __call__(self, client_id: str, outputs: list[RequestOutput]) -> None: ...


Command = Callable[[], None]


class EngineLoop:
    """Public methods may be called from any thread; what they ask for happens on the engine's own, between steps."""

    def __init__(self, core: EngineCore, role: Role, outbox: Outbox, clock: Clock) -> None:
        self._core = core
        self._role = role
        self._outbox = outbox
        self._clock = clock
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._clients: dict[str, set[str]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._is_draining = False
        self._is_stopping = False
        self._drained = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        """What ended the loop, if it ended by itself: the device is beyond help."""
        self.snapshot = self._take_snapshot()

    def start(self) -> None:
        self._thread.start()

    def submit(self, client_id: str, request: EngineRequest) -> None:
        self._commands.put(lambda: self._admit(client_id, request))

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        """Ends this client's requests; those of other clients are out of its reach."""
        self._commands.put(lambda: self._abort(client_id, request_ids))

    def abort_client(self, client_id: str) -> None:
        """The client is gone: everything it asked for ends."""
        self._commands.put(lambda: self._abort(client_id, tuple(self._clients.get(client_id, ()))))

    def wake(self) -> None:
        """There is news from outside, such as a transfer that ended."""
        self._commands.put(lambda: None)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until nothing is left to lose, as when the loop has ended by itself; False if
        the time was not enough."""
        self._commands.put(self._begin_drain)
        return self._drained.wait(timeout_s)

    def stop(self) -> None:
        """Ends the thread after the step under way. What is still running ends with it; drain first."""
        self._commands.put(self._begin_stop)
        self._thread.join()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end by itself."""
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                self._end_overdue()
                self._deliver(self._core.step())
                self._publish()
        except Exception as error:  # the edge of the thread: whoever watches the worker must learn of it
            logger.exception("the engine loop ended")
            self.failure = error
        finally:
            self._drained.set()
            self._core.close()

    def _take_commands(self) -> None:
        """Runs all commands that wait; blocks for one first if a step could not achieve anything."""
        block = not self._core.may_progress
        try:
            self._commands.get(block, self._seconds_to_deadline() if block else None)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _seconds_to_deadline(self) -> float | None:
        return max(0.0, self._deadlines[0][0] - self._clock.now()) if self._deadlines else None

    def _admit(self, client_id: str, request: EngineRequest) -> None:
        try:
            if self._is_draining:
                raise Overloaded("this worker is draining", 1.0)
            if any(request.request_id in ids for ids in self._clients.values()):
                raise InvalidRequest("request_id", f"{request.request_id} is in use")
            self._role.admit(request, self._core.request_counts())
            self._core.add_request(request, client_id)
        except RequestError as error:
            self._outbox(client_id, [_refusal(request.request_id, error)])
            return
        self._clients.setdefault(client_id, set()).add(request.request_id)
        if request.timeout_s is not None:
            heapq.heappush(self._deadlines, (self._clock.now() + request.timeout_s, request.request_id))

    def _abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        own = self._clients.get(client_id, set()).intersection(request_ids)
        self._deliver(self._core.finish_requests(own, RequestStatus.FINISHED_ABORTED))

    def _end_overdue(self) -> None:
        now = self._clock.now()
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            overdue.append(heapq.heappop(self._deadlines)[1])
        if overdue:
            self._deliver(
                self._core.finish_requests(
                    overdue, RequestStatus.FINISHED_ABORTED, "the request's deadline passed"
                )
            )

    def _deliver(self, news: ClientOutputs) -> None:
        for client_id, outputs in news.items():
            self._outbox(client_id, outputs)
            ended = {output.request_id for output in outputs if output.finish_reason is not None}
            if ended and client_id in self._clients:
                self._clients[client_id] -= ended
                if not self._clients[client_id]:
                    del self._clients[client_id]
        if not self._clients:
            self._deadlines.clear()  # what is left belongs to requests that finished in time

    def _publish(self) -> None:
        self.snapshot = self._take_snapshot()
        if self.snapshot.is_drained:
            self._drained.set()

    def _take_snapshot(self) -> EngineSnapshot:
        requests, blocks = self._core.request_counts(), self._core.kv_block_counts()
        return EngineSnapshot(
            role=self._role.kind,
            is_draining=self._is_draining,
            is_drained=self._is_draining and self._role.is_drained(requests, blocks),
            kv_blocks=blocks,
            requests=requests,
            counters=self._core.counters(),
        )

    def _begin_drain(self) -> None:
        self._is_draining = True

    def _begin_stop(self) -> None:
        self._is_stopping = True


def _refusal(request_id: str, error: RequestError) -> RequestOutput:
    kinds = {InvalidRequest: ErrorKind.INVALID_REQUEST, Overloaded: ErrorKind.OVERLOADED}
    return RequestOutput(
        request_id=request_id,
        first_position=0,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=kinds.get(type(error), ErrorKind.INTERNAL),
    )
