"""Supervisor: starts, watches and replaces the process of one replica, and passes operators' commands to its worker."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from baton.clock import Clock
from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError, FleetError
from baton.fleet import CacheFlush, ReplicaState
from baton.messages.control import Drain, FlushCache, SetRole, WaitStatus
from baton.system.awake_timer import awake_timeout
from baton.system.standstill import Standstill, pace_of
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole, WorkerState, WorkerStatus
from cluster.controller.launcher import Found, Incarnation, Launcher, NodeDrains
from cluster.controller.next_incarnation import NextIncarnation
from cluster.controller.replica import Replica
from worker.drain import longest_drain_s

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
"""Pause between two status reports of a worker. A worker whose engine has ended reports without this pause."""
_SOON_S = 0.01
"""The pause before a status report that is needed at once."""
_STOP_TIMEOUT_S = 5.0
"""A worker that does not close its ports in this time is killed."""
_DRAINS_UNASKED = "worker %s drains, but no command waits for its end; replacing the worker"
_NOT_CLEAN = (
    "worker %s left before its transfers and leases had ended; other workers compute the missing KV again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the control plane waits for a worker, in seconds."""

    start_s: float
    unresponsive_s: float
    """A process that does not answer for longer than this counts as hanging."""
    drain_s: float
    """The time that running requests get when a worker drains or changes its role."""
    whole_drain_s: float
    """The time for a whole drain or change of role: first requests, then transfers and leases."""

    @classmethod
    def of(cls, config: BatonConfig) -> "Patience":
        """`whole_drain_s` is longer than the worker's own limit for a drain, so that the worker can still answer."""
        cluster = config.cluster
        drain_s = longest_drain_s(cluster.drain_timeout_s, config.kv_transfer.lease_s)
        return cls(
            start_s=cluster.start_timeout_s,
            unresponsive_s=cluster.unresponsive_timeout_s,
            drain_s=cluster.drain_timeout_s,
            whole_drain_s=drain_s + cluster.unresponsive_timeout_s,
        )


class Supervisor:
    """Owns the incarnations of one replica. `run` is its loop; the other methods send commands to its worker.

    All methods belong to one event loop. `on_change` is called after each change of the replica or its worker's role.
    """

    def __init__(
        self,
        replica: Replica,
        launcher: Launcher,
        patience: Patience,
        clock: Clock,
        on_incarnation: Callable[[str], int],
        on_change: Callable[["Supervisor"], None],
    ) -> None:
        """`on_incarnation`: see NextIncarnation."""
        self.replica = replica
        self.endpoint: WorkerEndpoint | None = None
        """Set while the worker serves or drains."""
        self.status: WorkerStatus | None = None
        """The status in the worker's last answer."""
        self.progress: StartProgress | None = None
        self.failure: BatonError | None = None
        """The latest failure of an incarnation. It stays when the next incarnation serves; None before the first."""
        self.death: tuple[str, str] | None = None
        """The last incarnation that failed while it served, and why it failed."""
        self._last_end = ("", "")
        """The last incarnation that ended after it had served, and why it ended."""
        self._launcher = launcher
        self._patience = patience
        self._clock = clock
        self._on_change = on_change
        self._incarnation: Incarnation | None = None
        self.has_served = False
        """Whether an incarnation has served. An adopted incarnation serves before `run` first waits."""
        self._next = NextIncarnation(replica, launcher, patience.start_s, on_incarnation, self._note_progress)
        self._serves_since = 0.0
        self._changed = asyncio.Event()
        self._commands = asyncio.Lock()

    @property
    def is_serving(self) -> bool:
        return self.replica.state is ReplicaState.SERVING

    @property
    def takes_requests(self) -> bool:
        """Whether the worker serves and, as of its last answer, neither drains nor changes its role."""
        return self.is_serving and (self.status is None or self.status.state is not WorkerState.DRAINING)

    async def run(self, found: Found | None = None) -> None:
        """Starts one process after another for this replica. Cancel this call to end the worker and its processes.

        Begins with the incarnation `found`, if there is one.
        """
        try:
            while True:
                ready, found = found or self._next.take_prepared(), None
                try:
                    incarnation = await self._place(ready)
                    self._serve(ready or Found(incarnation, await self._next.start(incarnation)))
                    await self._watch(incarnation)
                except Exception as error:  # even an unexpected error: the replica must not stay empty
                    failure = _as_failure(error)
                    served_s = self._served_s()
                    await self._end_incarnation(str(failure), timeout_s=0.0)
                    await self._back_off(failure, served_s)
        finally:
            await self._next.discard()
            await self._end_incarnation(
                "it was stopped", _STOP_TIMEOUT_S if self.endpoint is not None else 0.0
            )

    async def drain(self) -> None:
        """Drains a serving worker: it accepts no more requests.

        Its process still runs: cancel `run` to end the process.
        """
        async with self._commands:
            await self._drain()

    async def renew(self) -> WorkerEndpoint:
        """Replaces the serving incarnation by a new one; returns the new endpoint once it serves.

        If there is room, the new incarnation starts before the old one drains. Raises FleetError, with the
        reason, if the new incarnation fails. If it fails before the old one drains, the old one still serves.

        `run` must not end during this call: cancel this call first.
        """
        async with self._commands:
            former = (await self._serving_endpoint()).ref.incarnation
            incarnation = self._incarnation
            if await self._launcher.has_room(self.replica.role):
                await self._next.prepare()
            if incarnation is not None and self._incarnation is incarnation:
                await self._drain_and_end(incarnation)
            else:  # the old incarnation failed meanwhile, so `run` already starts another one
                await self._next.discard()
            return await self._serving_endpoint(other_than=former)

    async def set_role(self, role: WorkerRole) -> None:
        """Changes the worker's role. Raises FleetError if the worker keeps its old role."""
        async with self._commands:
            incarnation, endpoint = self._incarnation, self.endpoint
            if incarnation is None or endpoint is None or not self.is_serving:
                raise FleetError(
                    f"worker {self.replica.name} {self._state_text()}, so it cannot change its role"
                )
            try:
                async with awake_timeout(self._patience.whole_drain_s):
                    await incarnation.call(SetRole(role, self._patience.drain_s))
            except (TimeoutError, BatonError) as error:
                reason = self._why_ended(endpoint) or str(error) or "it did not answer in time"
                await self._ask_status(incarnation)  # the worker may still be draining for another reason
                raise FleetError(
                    f"worker {self.replica.name} remains a {endpoint.role.value} worker: {reason}"
                ) from None
            self.status = None  # the last status may say that the worker still changes its role
            self._note_role(role)

    async def flush_cache(self, *, force: bool) -> CacheFlush:
        """Flushes the prefix cache between two steps of the worker, also while another command runs.

        Does nothing if the worker does not serve yet: then it has no prefix cache.
        """
        incarnation, patience_s = self._incarnation, self._patience.unresponsive_s
        if incarnation is None or self.endpoint is None:
            return CacheFlush(self.replica.name)
        try:
            async with awake_timeout(patience_s):
                await incarnation.call(FlushCache(force, patience_s / 2))  # a refusal must arrive in time
        except (TimeoutError, BatonError) as error:
            return CacheFlush(self.replica.name, str(error) or "it did not answer in time")
        return CacheFlush(self.replica.name)

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether the present incarnation, or the next one, is on one of these nodes."""
        present = self._incarnation
        return (present is not None and present.node in nodes) or self._next.is_on(nodes)

    async def move_away(self, nodes: Collection[str]) -> None:
        """Drains and ends the present incarnation if it is on one of these nodes.

        The next incarnation begins as soon as there is room; this call does not wait for it. If the next incarnation
        already starts on one of these nodes, it gives way to another one.
        """
        self._next.avoid(nodes)
        async with self._commands:
            if self._incarnation is not None and self._incarnation.node in nodes:
                await self._drain_and_end(self._incarnation)

    async def replace_draining(self) -> None:
        """If the present incarnation drains, ends it once it has drained.

        The next incarnation begins as soon as there is room.
        """
        async with self._commands:
            if (incarnation := self._incarnation) is None:
                return
            await self._ask_status(incarnation)
            if self.is_serving and not self.takes_requests:
                logger.warning(_DRAINS_UNASKED, self.replica.name)
                await self._drain_and_end(incarnation)

    async def _ask_status(self, incarnation: Incarnation) -> None:
        """Asks what the worker is doing now. Ignores errors, since `run` handles a worker that does not answer."""
        with contextlib.suppress(TimeoutError, BatonError):
            async with awake_timeout(self._patience.unresponsive_s):
                self.status = await incarnation.call(WaitStatus(_SOON_S))

    async def _place(self, ready: Found | None) -> Incarnation:
        """Returns the next incarnation: that of `ready`, if given, else a new one."""
        self._notify()
        self._incarnation = incarnation = await self._next.place() if ready is None else ready.incarnation
        self.replica.num_starts = incarnation.number
        self.replica.node = incarnation.node
        self.replica.move(ReplicaState.STARTING)
        self._notify()
        return incarnation

    def _serve(self, ready: Found) -> None:
        self.endpoint, self.status = ready.endpoint, ready.status
        self.has_served = True
        self.progress = None
        self._serves_since = self._clock.now()
        self.replica.move(ReplicaState.SERVING)
        self._notify()

    async def _watch(self, incarnation: Incarnation) -> None:
        """Raises ClusterError once this incarnation has ended, for any reason."""
        timeout_s, drains_since = self._patience.unresponsive_s, None
        standstill = Standstill(pace_of(self._patience.whole_drain_s))
        while True:
            try:
                async with awake_timeout(PING_INTERVAL_S + timeout_s):
                    self.status = status = await incarnation.call(WaitStatus(PING_INTERVAL_S))
            except TimeoutError:
                raise ClusterError(
                    f"it did not answer for {timeout_s:g} s (cluster.unresponsive_timeout_s)"
                ) from None
            if status.state.has_ended:
                raise ClusterError(status.failure or "its engine ended")
            if not self._commands.locked() and self.endpoint and status.role is not self.endpoint.role:
                self._note_role(status.role)  # a former controller began this change
            now = standstill.running(self._clock.now())
            if self._commands.locked() or not self.is_serving or status.state is not WorkerState.DRAINING:
                drains_since = None
            elif drains_since is None:
                drains_since = now
            elif now - drains_since > self._patience.whole_drain_s:
                logger.warning(_DRAINS_UNASKED, self.replica.name)
                self.replica.move(ReplicaState.DRAINING)
                raise ClusterError("a former controller began to drain it")

    async def _drain(self) -> None:
        """Drains the worker until it is empty, out of time, or dead."""
        incarnation, endpoint = self._incarnation, self.endpoint
        if incarnation is None or endpoint is None or not self.is_serving:
            return
        self.replica.move(ReplicaState.DRAINING)
        self._notify()
        try:
            async with awake_timeout(self._patience.whole_drain_s):
                drained = await incarnation.call(Drain(self._patience.drain_s))
        except (TimeoutError, BatonError) as error:
            reason = self._why_ended(endpoint) or str(error) or "it did not answer in time"
            logger.warning("worker %s did not drain: %s", self.replica.name, reason)
        else:
            if not drained.is_clean:
                logger.warning(_NOT_CLEAN, self.replica.name)

    async def _drain_and_end(self, incarnation: Incarnation) -> None:
        """Drains and ends the present incarnation. Returns when `run` has noticed the end."""
        await self._drain()
        await incarnation.stop(_STOP_TIMEOUT_S)
        while self._incarnation is incarnation:
            self._changed.clear()
            await self._changed.wait()

    def _why_ended(self, endpoint: WorkerEndpoint) -> str:
        """Why `run` has ended the incarnation of this endpoint; empty if it has not."""
        incarnation, reason = self._last_end
        return reason if incarnation == endpoint.ref.incarnation else ""

    def _served_s(self) -> float:
        return 0.0 if self.endpoint is None else self._clock.now() - self._serves_since

    async def _end_incarnation(self, reason: str, timeout_s: float) -> None:
        """Withdraws the endpoint, ends the process and frees its room."""
        if self.endpoint is not None:
            self._last_end = (self.endpoint.ref.incarnation, reason)
            self.death = self._last_end if self.is_serving else self.death
        self.endpoint, self.status, self.progress = None, None, None
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is not None:
            self._notify()
            await incarnation.stop(timeout_s)

    async def _back_off(self, error: BatonError, served_s: float) -> None:
        """Waits until the next incarnation may begin. Does not wait if the last one, or its node, was draining."""
        replica = self.replica
        if replica.state is ReplicaState.DRAINING or isinstance(error, NodeDrains):
            replica.move(ReplicaState.PLACING)
            return
        self.failure = error
        extra = {"worker": replica.name}
        logger.error("worker %s (%s) died: %s", replica.name, replica.role.value, error, extra=extra)
        delay_s = replica.died(self._clock.now(), served_s, str(error))
        self._notify()
        await asyncio.sleep(delay_s)
        replica.move(ReplicaState.PLACING)

    async def _serving_endpoint(self, other_than: str | None = None) -> WorkerEndpoint:
        """Waits until an incarnation other than `other_than` serves; FleetError if it fails or is late."""
        with contextlib.suppress(TimeoutError):
            async with awake_timeout(self._patience.start_s):
                while self.is_serving and self.endpoint is None:
                    self._changed.clear()  # the end of the former incarnation is no failure of the next one
                    await self._changed.wait()
                failure_before = self.failure
                while not (self.is_serving and self.endpoint and self.endpoint.ref.incarnation != other_than):
                    if self.failure is not failure_before:
                        break
                    self._changed.clear()
                    await self._changed.wait()
                else:
                    return self.endpoint
        reason = self.replica.last_failure or f"waited {self._patience.start_s:g} s"
        raise FleetError(f"worker {self.replica.name} {self._state_text()}: {reason}")

    def _state_text(self) -> str:
        return f"does not serve ({self.replica.state.value.replace('_', ' ')})"

    def _note_role(self, role: WorkerRole) -> None:
        assert self.endpoint is not None
        self.endpoint = replace(self.endpoint, role=role)
        self.replica.role = role
        self._notify()

    def _note_progress(self, progress: StartProgress) -> None:
        self.progress = progress
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._on_change(self)


def _as_failure(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    logger.error("unexpected error", exc_info=error)
    return ClusterError(f"{type(error).__name__}: {error}")
