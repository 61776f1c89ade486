"""EngineLoop: the thread that owns an EngineCore; takes commands, and runs steps while there is work.

Knows the current role, exchanges it, and passes outputs to an outbox; knows no socket.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from baton.clock import Clock
from baton.errors import FleetError, Overloaded, RequestError
from baton.request import EngineRequest, RequestOutput
from baton.step import ClientOutputs
from baton.worker import KVBlockCounts, RequestCounts, WorkerLoad, WorkerRole
from worker.client_requests import ClientRequests, refusal
from worker.commands import CommandQueue
from worker.core import EngineCore
from worker.drain import DrainStage, DrainState, longest_drain_s, what_remains
from worker.kv_events import KVChange, merge_events
from worker.role import Role

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
"""How often a busy engine's load is measured. Each measurement visits all requests; heartbeats are rarer."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's state after its last step; replaced whole, so any thread may read it."""

    role: WorkerRole
    is_draining: bool
    kv_blocks: KVBlockCounts
    requests: RequestCounts
    counters: dict[str, int]
    """The counters of EngineCore."""
    load: WorkerLoad
    """At most LOAD_INTERVAL_S older than the snapshot; without `oldest_waiting_s`, which grows between snapshots."""
    oldest_arrival: float | None
    """Arrival of the oldest request that waits for its first step, on the engine's clock; None if there is none."""


class Outbox(Protocol):
    """Receives outputs, as RequestServer does; must not block, since it is called between two steps."""

    def send(self, client_id: str, outputs: list[RequestOutput]) -> None: ...

    def send_kv_change(self, client_ids: tuple[str, ...], change: KVChange) -> None:
        """Sends changes of the prefix cache since the last call."""
        ...

    def beat(self) -> None:
        """Sends heartbeats now, to notify all gateways of a change."""
        ...


class EngineLoop:
    """Public methods may be called from any thread; the engine's own thread carries them out, between steps."""

    def __init__(
        self,
        core: EngineCore,
        role: Role,
        outbox: Outbox,
        clock: Clock,
        lease_s: float,
        commands: CommandQueue,
    ) -> None:
        """`lease_s`: how long transfers and leases may take to end after the timeout of a drain."""
        self._core, self._scheduler = core, core.scheduler
        self._role = role
        self._outbox = outbox
        self._clock = clock
        self._commands = commands
        self._requests = ClientRequests(core, clock)
        self._kv_subscribers: set[str] = set()
        self._lease_s = lease_s
        self._drain_state: DrainState | None = None
        """The current drain or change of role; kept when the worker is drained for good."""
        self._is_unfit = False
        """Whether the engine's device cannot be trusted. If so, the current drain is the last, and ends the loop."""
        self._is_stopping = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        """The error that ended the loop, if it ended by itself: for example, the device is unusable."""
        self._load, self._oldest_arrival = core.load()
        self._load_due_at = clock.now() + LOAD_INTERVAL_S
        self.snapshot = self._take_snapshot()

    def start(self) -> None:
        self._thread.start()

    def submit(self, client_id: str, request: EngineRequest) -> None:
        self._commands.put(lambda: self._admit(client_id, request))

    def decline(self, request: EngineRequest) -> None:
        """Notifies the prefill worker of a request that this worker refused, and that never reached the engine."""
        self._commands.put(lambda: self._requests.decline(request))

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        """Ends these requests of this client; other clients' requests are not affected."""
        self._commands.put(lambda: self._abort(client_id, request_ids))

    def abort_client(self, client_id: str) -> None:
        """Ends all requests of a client that is gone."""
        self._commands.put(lambda: self._abort_client(client_id))

    def subscribe_kv_events(self, client_id: str) -> None:
        """Sends this client a listing of the prefix cache, and its changes from then on, until `abort_client`."""
        self._commands.put(lambda: self._subscribe_kv(client_id))

    def fail(self, error: BaseException) -> None:
        """Ends the loop with this error: something that the engine needs has failed."""
        self._commands.put(lambda: _raise(error))

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests for good. Returns True as soon as nothing remains that could be lost.

        Running requests have `timeout_s` to end; then the rest is given back. Transfers and leases have
        `lease_s` more. The result can be True even if the loop ends by itself. Raises FleetError while the
        role changes.
        """
        drain_state = self._drain_and_wait(None, timeout_s)
        return drain_state.outcome.result() if drain_state.outcome.done() else self._ended.done()

    def set_role(self, role: Role, timeout_s: float) -> None:
        """Drains as `drain` does, then serves in the other role, with its prefix cache as it is.

        Raises FleetError with the cause if that failed. Then the worker keeps its old role.
        """
        drain_state = self._drain_and_wait(role, timeout_s)
        if not drain_state.outcome.done():
            obstacle = "its engine has ended" if self._ended.done() else "its engine is busy with a long step"
            raise FleetError(f"it did not become a {role.kind.value} worker: {obstacle}")
        if not drain_state.outcome.result():
            raise FleetError(
                f"it did not become a {role.kind.value} worker: {drain_state.obstacle}, after {timeout_s:g} s for "
                f"requests and {self._lease_s:g} s for leases; it serves in its old role"
            )

    def flush_cache(self, timeout_s: float, *, force: bool) -> None:
        """Empties the prefix cache. Raises FleetError if that fails, as `EngineHost.flush_cache` says."""
        self._commands.ask(lambda: self._flush_cache(force), timeout_s, self._ended)

    def stop(self) -> None:
        """Ends the thread after the current step. May be called before `start`.

        Unfinished requests end with the thread, so drain first.
        """
        if self._thread.ident is None:
            self._core.close()
            return
        self._commands.put(self._begin_stop)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    def serves_as(self, role: WorkerRole) -> bool:
        """Whether the worker served in this role after the last step."""
        return self.snapshot.role is role and not self.snapshot.is_draining

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls back on the engine's thread when the loop has ended, for any reason; at once if it already has."""
        self._ended.add_done_callback(lambda _: callback())

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_commands()
                self._deliver(self._requests.end_overdue())
                self._deliver(self._core.step())
                self._notify_kv_subscribers()
                self._drain_if_unfit()
                self._advance_drain()
                self._publish()
        except BaseException as error:  # nothing else catches this: notify the supervisor
            logger.exception("the engine loop failed")
            self.failure = error
        finally:
            self._core.progress.begin()
            self._ended.set_result(None)
            self._outbox.beat()
            self._core.close()
            self._core.progress.end()

    def _run_commands(self) -> None:
        """Runs all waiting commands. If a step could achieve nothing, waits for a command first."""
        block, progress = not self._core.may_progress, self._core.progress
        if block:
            progress.end()
        try:
            command = self._commands.get(block, self._seconds_to_deadline() if block else None)
            while True:
                progress.begin()
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            progress.begin()

    def _seconds_to_deadline(self) -> float | None:
        drain_deadline = None if self._drain_state is None else self._drain_state.next_deadline()
        both = self._requests.next_deadline(), drain_deadline
        deadlines = [deadline for deadline in both if deadline is not None]
        return max(0.0, min(deadlines) - self._clock.now()) if deadlines else None

    def _admit(self, client_id: str, request: EngineRequest) -> None:
        try:
            if self._drain_state is not None:
                raise Overloaded(f"this worker {self._drain_state.doing}", 1.0)
            self._requests.admit(client_id, request, self._role)
        except RequestError as error:
            self._requests.decline(request)
            self._outbox.send(client_id, [refusal(request.request_id, error)])

    def _abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        self._deliver(self._requests.abort(client_id, request_ids))

    def _deliver(self, outputs_by_client: ClientOutputs) -> None:
        for client_id, outputs in outputs_by_client.items():
            self._outbox.send(client_id, outputs)
            self._requests.forget_ended(outputs)

    def _abort_client(self, client_id: str) -> None:
        if count := len(self._requests.of_client(client_id)):
            logger.warning("connection %s has ended; ending its %d request(s)", client_id, count)
        self._kv_subscribers.discard(client_id)
        if not self._kv_subscribers:
            self._scheduler.kv_events.ignore()
        self._deliver(self._requests.abort_client(client_id))

    def _subscribe_kv(self, client_id: str) -> None:
        self._notify_kv_subscribers()  # so that all subscribers are up to date before the listing
        listing = merge_events(self._scheduler.kv_events.full_listing())
        assert listing is not None, "a full listing must be a change"
        self._kv_subscribers.add(client_id)
        self._outbox.send_kv_change((client_id,), listing)

    def _notify_kv_subscribers(self) -> None:
        if (
            self._kv_subscribers
            and (change := merge_events(self._scheduler.kv_events.take_events())) is not None
        ):
            self._outbox.send_kv_change(tuple(self._kv_subscribers), change)

    def _flush_cache(self, force: bool) -> None:
        num_running = self._scheduler.request_counts().running
        if not self._scheduler.reset_prefix_cache(force):
            in_use = what_remains(self._scheduler.request_counts(), self._scheduler.kv_block_counts())
            raise FleetError(f"blocks are in use ({in_use}); wait, or use force")
        logger.info("emptied the prefix cache; %d running request(s) compute their KV again", num_running)

    def _publish(self) -> None:
        former, self.snapshot = self.snapshot, self._take_snapshot()
        if (former.role, former.is_draining) != (self.snapshot.role, self.snapshot.is_draining):
            self._outbox.beat()

    def _take_snapshot(self) -> EngineSnapshot:
        requests, blocks = self._scheduler.request_counts(), self._scheduler.kv_block_counts()
        now = self._clock.now()
        if now >= self._load_due_at or not self._core.may_progress:
            self._load, self._oldest_arrival = self._core.load()
            self._load_due_at = now + LOAD_INTERVAL_S
        return EngineSnapshot(
            role=self._role.kind,
            is_draining=self._drain_state is not None,
            kv_blocks=blocks,
            requests=requests,
            counters=self._core.counters(),
            load=self._load,
            oldest_arrival=self._oldest_arrival,
        )

    def _drain_and_wait(self, target: Role | None, timeout_s: float) -> DrainState:
        """Drains, for good or to change to the `target`. Returns when the drain or the loop ended, or the engine hangs.

        Raises FleetError if the drain is refused.
        """
        drain_state = DrainState(target, self._clock.now(), timeout_s, self._lease_s)
        self._commands.put(lambda: self._begin_drain(drain_state))
        either: list[Future[Any]] = [drain_state.outcome, self._ended]
        wait(either, longest_drain_s(timeout_s, self._lease_s), FIRST_COMPLETED)
        if drain_state.refusal is not None:
            raise FleetError(drain_state.refusal)
        return drain_state

    def _begin_drain(self, drain_state: DrainState) -> None:
        """Begins a drain or a change of role, or attaches it to the current one if that leads to the same role."""
        former = self._drain_state
        if former is None:
            self._drain_state = drain_state
        elif former.may_attach(drain_state):
            former.attach(drain_state)
        elif former.target is None and drain_state.target is None:
            self._drain_state = drain_state  # the former drain is over
        else:
            drain_state.refuse(f"it {former.doing}")

    def _drain_if_unfit(self) -> None:
        """If the engine is unfit: gives all requests back, and ends once all leases have ended."""
        is_changing_role = self._drain_state is not None and self._drain_state.target is not None
        if self._core.health.unfit_reason is None or self._is_unfit or is_changing_role:
            return
        self._is_unfit = True
        self._begin_drain(DrainState(None, self._clock.now(), 0.0, self._lease_s))

    def _advance_drain(self) -> None:
        if (drain_state := self._drain_state) is None:
            return
        requests, blocks = self._scheduler.request_counts(), self._scheduler.kv_block_counts()
        is_drained = self._role.is_drained(requests, blocks)
        match drain_state.advance(self._clock.now(), is_drained):
            case DrainStage.ENDING:
                self._deliver(self._core.give_back_requests(f"this worker {drain_state.doing}"))
            case DrainStage.OVER:
                self._conclude(drain_state, requests, blocks)

    def _conclude(self, drain_state: DrainState, requests: RequestCounts, blocks: KVBlockCounts) -> None:
        drain_state.obstacle = what_remains(requests, blocks) or "its engine had not finished a step"
        if drain_state.target is not None:
            self._drain_state = None
            if drain_state.is_clean:
                self._role = drain_state.target
            self._drain_if_unfit()
        self._publish()
        drain_state.report_outcome()
        if self._is_unfit:
            raise RuntimeError(self._core.health.unfit_reason)

    def _begin_stop(self) -> None:
        self._is_stopping = True


def _raise(error: BaseException) -> None:
    raise error
