"""Controller: keeps as many workers as there are to be, tells gateways which of them serve, takes operators' orders.

Plain asyncio: what runs workers is a Launcher, and what survives this process is a Store. It is on no request's path.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton.clock import Clock
from baton.config import BatonConfig
from baton.errors import BatonError, ConfigError, FleetError, ModelError
from baton.fleet import FleetDescription, FleetView, GatewayReport, RolloutStep, SlotDescription, SlotState
from baton.system.awake_timer import awake_timeout
from baton.system.standstill import Standstill, pace_of
from baton.worker import StartProgress, WorkerRole
from cluster.controller.autoscaler import Autoscaler
from cluster.controller.desired import DesiredFleet, DesiredSlot, Store
from cluster.controller.draining_nodes import LeavingNodes
from cluster.controller.launcher import Found, Launcher
from cluster.controller.replica import RestartPolicy, Restarts, Slot
from cluster.controller.rollout import Rollouts
from cluster.controller.supervisor import Keeper, Patience

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartReport:
    """How far a fleet's first start is, as of `version`."""

    version: int
    progress: tuple[tuple[str, StartProgress], ...]
    """Of each worker that loads, by name."""
    placing: tuple[str, ...]
    """Workers that have found no room yet."""
    unready: tuple[tuple[str, str], ...]
    """Workers that do not serve, and what ended their last life, if anything did."""
    lacking: tuple[WorkerRole, ...]
    """Roles of which there are to be workers, and none serves."""
    failure: BatonError | None
    """What no further try would change."""


class Controller:
    """Owns the fleet from `start` to `shutdown`. Everything belongs to one event loop."""

    def __init__(self, config: BatonConfig, launcher: Launcher, store: Store, clock: Clock) -> None:
        self._config = config
        self._launcher = launcher
        self._store = store
        self._clock = clock
        self._incarnation = secrets.token_hex(8)
        self._desired = DesiredFleet()
        self._keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changing_role: set[str] = set()
        self._version = 0
        self._start_version = 0
        self._changed = asyncio.Event()
        self._view = FleetView(self._incarnation, 0, ())
        is_scaled = config.autoscaling.mode != "off"
        self._autoscaler = Autoscaler(config, self, clock) if is_scaled else None
        self._scaling: asyncio.Task[None] | None = None
        self._was_whole = False
        """Every worker served once, under this controller or a predecessor."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._failure: BatonError | None = None
        self._num_asking = 0
        self._standstill = Standstill(pace_of(config.cluster.orphan_timeout_s))
        self._last_asked = self._running_s()
        self._owner_asked = asyncio.Event()
        self._rolling: str | None = None
        self._rollouts = Rollouts(self.rollout)
        self._leaving_nodes = LeavingNodes(launcher, self._keepers.values)

    async def start(self) -> None:
        """Takes up what a predecessor left, and begins to start the rest; returns before that serves."""
        content = self._store.load()
        self._desired = DesiredFleet.of(self._config) if content is None else DesiredFleet.from_json(content)
        self._launcher.avoid(self._desired.leaving_nodes)
        found = await self._launcher.adopt(self._config.cluster.unresponsive_timeout_s)
        for name in [slot.name for slot in self._desired.slots.values() if slot.is_leaving]:
            if name not in found:
                del self._desired.slots[name]
        await asyncio.gather(*[found[n].life.stop(0.0) for n in found if n not in self._desired.slots])
        self._save()
        self._was_whole = content is not None
        for slot in self._desired.slots.values():
            self._keep(slot, found.get(slot.name))
            if slot.is_leaving:
                self._leaving.add(asyncio.create_task(self.drain(slot.name), name=f"drain {slot.name}"))
        adopting = [self._keepers[name] for name in found if name in self._keepers]
        while not all(keeper.was_adopted for keeper in adopting):  # or the fleet would seem to have shrunk
            await self._changed.wait()
        self._leaving_nodes.resume(self._desired.leaving_nodes)
        if self._autoscaler is not None:
            self._scaling = asyncio.create_task(self._autoscaler.run(), name="autoscaler")

    # what gateways ask

    async def next_view(
        self, controller_incarnation: str, version: int, timeout_s: float, *, by_owner: bool = True
    ) -> FleetView:
        """Who serves, as soon as that is news to somebody who knows this version; after the time in any case.

        `by_owner`: who asks will end the fleet when it ends itself, unlike a gateway beside it.
        """
        await self._until(
            lambda: (controller_incarnation, version) != (self._incarnation, self._version),
            timeout_s,
            by_owner=by_owner,
        )
        return self._view

    async def next_start(self, version: int, timeout_s: float) -> StartReport:
        """How far the workers are, as soon as that is news to somebody who knows this version, or after the time."""
        await self._until(lambda: version != self._start_version, timeout_s)
        keepers = self._keepers.values()
        return StartReport(
            self._start_version,
            tuple((keeper.slot.name, keeper.progress) for keeper in keepers if keeper.progress),
            tuple(keeper.slot.name for keeper in keepers if keeper.slot.state is SlotState.PLACING),
            tuple((k.slot.name, k.slot.last_failure) for k in keepers if not k.is_serving),
            tuple({k.slot.role for k in keepers} - {k.slot.role for k in keepers if k.is_serving}),
            self._failure,
        )

    async def report(self, report: GatewayReport) -> None:
        """What a gateway saw lately, for the autoscaler."""
        if self._autoscaler is not None:
            self._autoscaler.report(report)

    # what operators ask: FleetControl

    async def describe(self) -> FleetDescription:
        return FleetDescription(
            slots=self.slots(),
            nodes=await self._launcher.nodes(),
            controller_incarnation=self._incarnation,
            decisions=self._autoscaler.decisions if self._autoscaler is not None else (),
        )

    async def drain(self, worker: str) -> None:
        """Returns once the worker has given away what it had, and is gone for good.

        FleetError for the last that decodes. Asked of a worker that was drained before, it returns at once: whoever
        asks again may have missed the answer.
        """
        if self._desired.was_there(worker):
            return
        keeper = self._keeper(worker)
        slot = self._desired.slots[worker]
        if slot.role is WorkerRole.DECODE and not slot.is_leaving:
            self._check_not_last(worker, "is drained")
        slot.is_leaving = True
        self._save()
        await keeper.drain()
        await self._let_go(worker)

    async def drain_node(self, node: str, timeout_s: float) -> None:
        """Returns once the node of this address or name has no workers: they gave away what they had, and have ended.

        Nothing is placed there for as long as it lives; elsewhere their next lives begin as soon as there is room.
        FleetError if there is no such node, if it is the only one, or the time is over; then it goes on all the same.
        """
        here = await self._leaving_nodes.mark(node)
        self._desired.leaving_nodes = self._leaving_nodes.names
        self._save()
        await self._leaving_nodes.empty(here, timeout_s)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        """Returns once the worker serves in its new role; if it cannot, it serves in its old one, and this raises."""
        keeper = self._keeper(worker)
        slot = self._desired.slots[worker]
        if keeper.slot.role is role:
            return
        if slot.is_leaving or worker in self._changing_role:
            raise FleetError(f"worker {worker} is leaving, or changes its role already; wait for that")
        ranks = {kind: self._config.num_ranks(kind) for kind in WorkerRole}
        if len(set(ranks.values())) > 1:
            raise FleetError(
                f"worker {worker} cannot become a {role.value} worker: these have {ranks[role]} ranks, it has "
                f"{ranks[slot.role]} (cluster.prefill_tensor_parallel, cluster.decode_tensor_parallel)"
            )
        if slot.role is WorkerRole.DECODE:
            self._check_not_last(worker, "changes its role")
        former, slot.role = slot.role, role
        self._changing_role.add(worker)
        self._save()
        try:
            await keeper.set_role(role)
        except BaseException:
            slot.role = former
            raise
        finally:
            self._changing_role.discard(worker)
            self._save()

    async def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        """Restarts these workers, or all, one after the other; yields as each new life serves.

        FleetError ends it half-way.
        """
        if self._rolling is not None:
            raise FleetError(f"a rollout is under way, at worker {self._rolling}; wait for its end")
        names = [self._keeper(name).slot.name for name in workers]
        names = names or [slot.name for slot in self._desired.slots.values() if not slot.is_leaving]
        try:
            for done, name in enumerate(names, 1):
                self._rolling = name
                keeper = self._keepers.get(name)
                if keeper is None or self._desired.slots[name].is_leaving:
                    continue
                try:
                    endpoint = await keeper.renew()
                except FleetError as error:
                    raise FleetError(
                        f"the rollout stopped after {done - 1} of {len(names)} workers: {error}"
                    ) from None
                yield RolloutStep(name, endpoint.ref.incarnation, done, len(names))
        finally:
            self._rolling = None

    async def begin_rollout(self, workers: tuple[str, ...]) -> str:
        """Its id; see cluster.controller.rollout."""
        return await self._rollouts.begin_rollout(workers)

    async def rollout_step(self, rollout_id: str, index: int) -> RolloutStep | None:
        return await self._rollouts.rollout_step(rollout_id, index)

    async def scale(self, role: WorkerRole, count: int) -> None:
        """So many workers of a role: new ones begin to start, or the least busy are drained, which is waited for."""
        if count < (1 if role is WorkerRole.DECODE else 0):
            raise FleetError(f"{count} {role.value} workers: at least one worker must decode")
        present = self._desired.with_role(role)
        for _ in range(count - len(present)):
            self._keep(self._desired.add(role), None)
        self._save()
        least_busy = sorted(present, key=lambda slot: self._burden(self._keepers[slot.name]))
        await asyncio.gather(*[self.drain(slot.name) for slot in least_busy[: max(0, len(present) - count)]])

    def slots(self) -> tuple[SlotDescription, ...]:
        """Every worker that there is to be, and what became of it."""
        now = self._clock.now()
        return tuple(keeper.slot.describe(now) for keeper in self._keepers.values())

    # what its owner asks

    async def is_owned(self, within_s: float) -> bool:
        """Whether an owner asks anew within the time."""
        self._owner_asked.clear()
        try:
            async with awake_timeout(within_s):
                await self._owner_asked.wait()
        except TimeoutError:
            return False
        return True

    async def orphaned(self, timeout_s: float) -> None:
        """Returns once no gateway has asked for so long; time in which this process stood still is not theirs."""
        look_every_s = pace_of(timeout_s) / 2
        while True:
            left_s = self._last_asked + timeout_s - self._running_s()
            if self._num_asking == 0 and left_s <= 0:
                return
            await asyncio.sleep(look_every_s if self._num_asking else min(left_s, look_every_s))

    async def shutdown(self, *, may_drain: bool) -> None:
        """Ends all workers at once, after they were drained if they may; then nothing of the fleet is left."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await asyncio.gather(self._rollouts.stop(), self._leaving_nodes.stop())
        if may_drain:
            await asyncio.gather(*[keeper.drain() for keeper in self._keepers.values()])
        tasks, self._tasks = (
            [*self._tasks.values(), *self._leaving],
            {},
        )  # nobody is cancelled twice, while it cleans up
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.clear()

    async def _until(self, is_news: Callable[[], bool], timeout_s: float, *, by_owner: bool = True) -> None:
        """Or for `timeout_s`. Somebody who asks, also for how the start goes on, is why the fleet is no orphan."""
        self._num_asking += 1
        if by_owner:
            self._owner_asked.set()
        try:
            async with asyncio.timeout(timeout_s):
                while not is_news():
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._num_asking -= 1
            self._last_asked = self._running_s()

    def _running_s(self) -> float:
        return self._standstill.running(self._clock.now())

    def _keep(self, desired: DesiredSlot, found: Found | None) -> None:
        cluster = self._config.cluster
        policy = RestartPolicy(
            delay_s=cluster.restart_delay_s,
            longest_delay_s=cluster.restart_delay_max_s,
            crash_loop_deaths=cluster.crash_loop_deaths,
            crash_loop_window_s=cluster.crash_loop_window_s,
            stable_after_s=cluster.stable_after_s,
        )
        patience = Patience(
            start_s=cluster.start_timeout_s,
            unresponsive_s=cluster.unresponsive_timeout_s,
            drain_s=cluster.drain_timeout_s,
            # Transfers end or fail within their own timeout, and leases that nobody renews soon after.
            leave_s=2 * self._config.kv_transfer.lease_s + cluster.unresponsive_timeout_s,
        )
        role = desired.role if found is None else found.endpoint.role
        slot = Slot(desired.name, role, Restarts(policy), num_starts=desired.num_starts)
        keeper = Keeper(slot, self._launcher, patience, self._clock, self._begin_life, self._note)
        self._keepers[desired.name] = keeper
        self._tasks[desired.name] = asyncio.create_task(keeper.run(found), name=f"keep {desired.name}")

    def _begin_life(self, name: str) -> int:
        slot = self._desired.slots[name]
        slot.num_starts += 1
        self._save()
        return slot.num_starts

    async def _let_go(self, name: str) -> None:
        """The worker is gone, and so is its slot."""
        if (task := self._tasks.pop(name, None)) is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        keeper = self._keepers.pop(name)
        del self._desired.slots[name]
        self._save()
        self._note(keeper)

    def _keeper(self, worker: str) -> Keeper:
        keeper = self._keepers.get(worker)
        if keeper is None:
            names = ", ".join(self._keepers) or "none"
            raise FleetError(f"there is no worker {worker!r}; there are: {names}")
        return keeper

    def _check_not_last(self, worker: str, what: str) -> None:
        others = [slot for slot in self._desired.with_role(WorkerRole.DECODE) if slot.name != worker]
        if not any(
            self._keepers[slot.name].is_serving and slot.name not in self._changing_role for slot in others
        ):
            raise FleetError(
                f"if worker {worker} {what}, no decode worker serves any more; add one first, or wait for one"
            )

    def _burden(self, keeper: Keeper) -> tuple[bool, int]:
        counts = keeper.status.requests if keeper.status else None
        busy = counts.running + counts.waiting + counts.waiting_for_remote_kvs if counts else 0
        return keeper.is_serving, busy

    def _note(self, keeper: Keeper) -> None:
        """Takes in that something about a worker has changed."""
        slot, desired = keeper.slot, self._desired.slots.get(keeper.slot.name)
        if desired is not None and desired.role is not slot.role and slot.name not in self._changing_role:
            desired.role = slot.role
            self._save()
        self._was_whole = self._was_whole or all(keeper.is_serving for keeper in self._keepers.values())
        if isinstance(keeper.failure, ConfigError | ModelError) and not self._was_whole:
            self._failure = keeper.failure
        endpoints = tuple(k.endpoint for k in self._keepers.values() if k.endpoint is not None)
        if endpoints != self._view.endpoints:
            self._version += 1
            deaths = tuple(k.death for k in self._keepers.values() if k.death is not None)
            self._view = FleetView(self._incarnation, self._version, endpoints, deaths)
        self._start_version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _save(self) -> None:
        self._store.save(self._desired.to_json())
