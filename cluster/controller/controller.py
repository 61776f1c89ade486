"""Controller: keeps the fleet's workers running, reports to gateways which of them serve, and carries out commands.

Plain asyncio: a Launcher runs the workers, and a Store keeps what survives this process. No request passes through it.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from baton.clock import Clock
from baton.config import BatonConfig
from baton.errors import BatonError, ConfigError, FleetError, ModelError, UnknownWorker
from baton.fleet import (
    FleetDescription,
    FleetView,
    GatewayReport,
    ReplicaDescription,
    ReplicaState,
    RolloutStep,
)
from baton.messages.control import CachesFlushed, CallFailure, StartReport, WaitStart, WaitView
from baton.system.tasks import end_tasks
from baton.worker import WorkerRole
from cluster.controller.autoscaler import Autoscaler
from cluster.controller.callers import Callers
from cluster.controller.commands import DrainingNodes, RoleChanges, Rollouts
from cluster.controller.desired import DesiredFleet, DesiredReplica, Store
from cluster.controller.launcher import Found, Launcher
from cluster.controller.replica import Replica, Restarts
from cluster.controller.supervisor import Patience, Supervisor

logger = logging.getLogger(__name__)

_DID_NOT_SERVE = "it did not serve when this controller started: it had ended, or was not ready yet"


class Controller:
    """Owns the fleet from `start` to `shutdown`. All methods belong to one event loop."""

    def __init__(self, config: BatonConfig, launcher: Launcher, store: Store, clock: Clock) -> None:
        self._cluster = config.cluster
        self._patience = Patience.of(config)
        self._ranks = {role: config.num_ranks(role) for role in WorkerRole}
        self._has_equal_ranks = len(set(self._ranks.values())) == 1
        self._launcher = launcher
        self._store = store
        self._clock = clock
        self._incarnation = secrets.token_hex(8)
        self._desired = DesiredFleet()
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._role_changes = RoleChanges(self._save)
        self._version = 0
        self._start_version = 0
        self._changed = asyncio.Event()
        self._view = FleetView(self._incarnation, 0, ())
        self._autoscaler: Autoscaler | None = None
        if config.autoscaling.mode != "off":
            bounds = {role: config.worker_bounds(role) for role in WorkerRole}
            self._autoscaler = Autoscaler(config.autoscaling, bounds, self._has_equal_ranks, clock, self)
        self._scaling: asyncio.Task[None] | None = None
        self._was_whole = False
        """Whether all workers once served at the same moment, under this controller or a former one."""
        self._resumed: set[asyncio.Task[None]] = set()
        """Tasks that continue what a former controller began."""
        self._failure: BatonError | None = None
        self._callers = Callers(clock, config.cluster.orphan_timeout_s)
        self._rolling: str | None = None
        self.rollouts = Rollouts(self.rollout)
        self._draining_nodes = DrainingNodes(launcher, self._supervisors.values)

    async def start(self) -> None:
        """Adopts a former controller's workers and begins to start the others; returns before these serve."""
        content = self._store.load()
        self._desired = DesiredFleet.of(self._cluster) if content is None else DesiredFleet.from_json(content)
        self._launcher.avoid(self._desired.draining_nodes)
        found = await self._launcher.adopt(self._cluster.unresponsive_timeout_s)
        for name in [replica.name for replica in self._desired.replicas.values() if replica.is_draining]:
            if name not in found:
                del self._desired.replicas[name]
        await asyncio.gather(
            *[found[n].incarnation.stop(0.0) for n in found if n not in self._desired.replicas]
        )
        self._save()
        self._was_whole = content is not None
        for replica in self._desired.replicas.values():
            self._supervise(replica, found.get(replica.name))
            if (serving := found.get(replica.name)) is not None:
                self._continue_former(replica, serving)
        adopting = [self._supervisors[name] for name in found if name in self._supervisors]
        # The first view must have all adopted workers: gateways drop every worker that is not in a view.
        while not all(supervisor.has_served for supervisor in adopting):
            await self._changed.wait()
        self._draining_nodes.resume(self._desired.draining_nodes)
        if self._autoscaler is not None:
            self._scaling = asyncio.create_task(self._autoscaler.run(), name="autoscaler")

    # calls of gateways

    async def wait_view(self, request: WaitView) -> FleetView:
        """See WaitView. A call shows that the fleet is in use."""
        known = (request.controller_incarnation, request.version)
        await self._until(lambda: known != (self._incarnation, self._version), request.wait_s)
        return self._view

    async def wait_start(self, request: WaitStart) -> StartReport:
        """See WaitStart. Only the owner calls this."""
        await self._until(lambda: request.version != self._start_version, request.wait_s)
        supervisors = self._supervisors.values()
        serving = {supervisor.replica.role for supervisor in supervisors if supervisor.is_serving}
        return StartReport(
            version=self._start_version,
            progress=tuple((each.replica.name, each.progress) for each in supervisors if each.progress),
            placing=tuple(
                each.replica.name for each in supervisors if each.replica.state is ReplicaState.PLACING
            ),
            unready=tuple(
                (each.replica.name, each.replica.last_failure) for each in supervisors if not each.is_serving
            ),
            lacking=tuple({each.replica.role for each in supervisors} - serving),
            failure=None if self._failure is None else CallFailure.of(self._failure),
        )

    async def report(self, report: GatewayReport) -> None:
        """Passes a gateway's recent measurements to the autoscaler."""
        if self._autoscaler is not None:
            self._autoscaler.report(report)

    # calls of operators

    async def describe(self) -> FleetDescription:
        return FleetDescription(
            replicas=self.replicas(),
            nodes=await self._launcher.nodes(),
            controller_incarnation=self._incarnation,
            decisions=self._autoscaler.decisions if self._autoscaler is not None else (),
        )

    async def drain(self, worker: str) -> None:
        """Returns once the worker's requests have ended or moved, and the worker is removed.

        Raises FleetError for the last decode worker. Returns at once if the worker was already removed by a
        drain: the caller may have missed the first answer.
        """
        if self._desired.is_former(worker):
            return
        supervisor = self._supervisor(worker)
        replica = self._desired.replicas[worker]
        if replica.role is WorkerRole.DECODE and not replica.is_draining:
            self._check_not_last(worker, "is drained")
        replica.is_draining = True
        self._save()
        await supervisor.drain()
        await self._remove(worker)

    async def drain_node(self, node: str, timeout_s: float) -> None:
        """Drains all workers of the node with this address or name; returns once these workers have ended.

        The node gets no new workers for as long as it lives. The next incarnations begin on other nodes, once
        those have room. Raises FleetError if the node is unknown or the only one, and also
        after `timeout_s`; draining then continues.
        """
        here = await self._draining_nodes.mark(node)
        self._desired.draining_nodes = self._draining_nodes.remembered
        self._save()
        await self._draining_nodes.empty(here, timeout_s)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        """Returns once the worker serves in its new role. Raises FleetError if it keeps its old role.

        Joins a running change to the same role: the caller may have missed the first answer.
        """
        supervisor = self._supervisor(worker)
        replica, is_changing = self._desired.replicas[worker], worker in self._role_changes
        if replica.is_draining or (is_changing and replica.role is not role):
            raise FleetError(
                f"worker {worker} is draining or is changing its role; try again when that has ended"
            )
        if is_changing:
            await self._role_changes.join(worker)
            return
        if supervisor.replica.role is role:
            return
        if not self._has_equal_ranks:
            raise FleetError(
                f"worker {worker} cannot become a {role.value} worker: {role.value} workers have {self._ranks[role]} "
                f"ranks, but this worker has {self._ranks[replica.role]} (cluster.prefill_tensor_parallel, "
                "cluster.decode_tensor_parallel)"
            )
        if replica.role is WorkerRole.DECODE:
            self._check_not_last(worker, "changes its role")
        self._role_changes.begin(replica, supervisor, role)
        await self._role_changes.join(worker)

    async def flush_caches(self, workers: tuple[str, ...], *, force: bool) -> CachesFlushed:
        """Flushes the prefix caches of these workers (all if none is given); returns each worker's result."""
        supervisors = list(map(self._supervisor, dict.fromkeys(workers))) or list(self._supervisors.values())
        flushes = [supervisor.flush_cache(force=force) for supervisor in supervisors]
        return CachesFlushed(tuple(await asyncio.gather(*flushes)))

    async def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        """Restarts these workers (all if none is given) one by one; yields when a new incarnation serves.

        Raises FleetError if a restart fails; the workers after it are then not restarted.
        """
        if self._rolling is not None:
            raise FleetError(f"a rollout is under way, at worker {self._rolling}; wait for its end")
        names = [self._supervisor(name).replica.name for name in dict.fromkeys(workers)]
        names = names or [
            replica.name for replica in self._desired.replicas.values() if not replica.is_draining
        ]
        num_restarted = 0
        try:
            for done, name in enumerate(names, 1):
                self._rolling = name
                supervisor = self._supervisors.get(name)
                if supervisor is None or self._desired.replicas[name].is_draining:
                    continue
                try:
                    endpoint = await supervisor.renew()
                except FleetError as error:
                    raise FleetError(
                        f"the rollout stopped after restarting {num_restarted} of {len(names)} workers: {error}"
                    ) from None
                num_restarted += 1
                yield RolloutStep(name, endpoint.ref.incarnation, done, len(names))
        finally:
            self._rolling = None

    async def scale(self, role: WorkerRole, count: int) -> None:
        """Changes the number of workers of a role. Begins to start new workers, or drains the least busy ones."""
        if count < (1 if role is WorkerRole.DECODE else 0):
            raise FleetError(f"cannot scale to {count} {role.value} workers: at least one worker must decode")
        present = self._desired.with_role(role)
        for _ in range(count - len(present)):
            self._supervise(self._desired.add(role), None)
        self._save()
        least_busy = sorted(present, key=lambda replica: self._burden(self._supervisors[replica.name]))
        await asyncio.gather(
            *[self.drain(replica.name) for replica in least_busy[: max(0, len(present) - count)]]
        )

    def replicas(self) -> tuple[ReplicaDescription, ...]:
        """The state of every replica."""
        now = self._clock.now()
        return tuple(supervisor.replica.describe(now) for supervisor in self._supervisors.values())

    # what the autoscaler sees, beside `scale` and `set_role`: see ScaledFleet

    def replicas_to_scale(self) -> list[ReplicaDescription]:
        return [
            replace(each, role=self._desired.replicas[each.name].role, state=ReplicaState.STARTING)
            if each.name in self._role_changes
            else each
            for each in self.replicas()
        ]

    @property
    def leaving(self) -> frozenset[str]:
        return self._desired.leaving

    # calls of the fleet's owner

    async def orphaned(self) -> None:
        """Returns once no gateway and no owner has called for `cluster.orphan_timeout_s`. Standstills do not count."""
        await self._callers.orphaned()

    async def shutdown(self, *, may_drain: bool) -> None:
        """Ends all workers together, after a drain if `may_drain`. Then nothing of the fleet remains."""
        if self._scaling is not None:
            await end_tasks(self._scaling)
        await asyncio.gather(self.rollouts.stop(), self._draining_nodes.stop())
        if may_drain:
            await asyncio.gather(*[supervisor.drain() for supervisor in self._supervisors.values()])
        tasks = [*self._tasks.values(), *self._resumed]
        self._tasks = {}  # a second shutdown must not cancel tasks that are cleaning up
        await end_tasks(*tasks)
        await self._role_changes.stop()
        self._store.clear()

    async def _until(self, has_changed: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `has_changed` is true, or for `timeout_s`."""
        with self._callers.waiting(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not has_changed():
                    await self._changed.wait()

    def _supervise(self, desired: DesiredReplica, found: Found | None) -> None:
        role = desired.role if found is None else found.endpoint.role
        replica = Replica(desired.name, role, Restarts(self._cluster), num_starts=desired.num_starts)
        if found is None and desired.num_starts:
            replica.last_failure = _DID_NOT_SERVE
            text, extra = "starting worker %s (%s) again: %s", {"worker": desired.name}
            logger.warning(text, desired.name, role.value, _DID_NOT_SERVE, extra=extra)
        supervisor = Supervisor(
            replica,
            self._launcher,
            self._patience,
            self._clock,
            self._begin_incarnation,
            self._note,
        )
        self._supervisors[desired.name] = supervisor
        self._tasks[desired.name] = asyncio.create_task(
            supervisor.run(found), name=f"supervise {desired.name}"
        )

    def _continue_former(self, replica: DesiredReplica, found: Found) -> None:
        """Continues what a former controller began with a worker that serves.

        A change of role that has already failed is not tried again: `_note` then sets the desired role to the
        present one.
        """
        name, supervisor = replica.name, self._supervisors[replica.name]
        if found.is_leaving and found.endpoint.role is not replica.role:
            self._role_changes.resume(replica, supervisor)
        if replica.is_draining:
            self._resumed.add(asyncio.create_task(self.drain(name), name=f"drain {name}"))
        elif found.is_leaving:
            self._resumed.add(asyncio.create_task(self._finish_leaving(supervisor), name=f"finish {name}"))

    async def _finish_leaving(self, supervisor: Supervisor) -> None:
        """If the worker changes its role, waits for the end of the change. If its incarnation then drains, replaces
        it."""
        name = supervisor.replica.name
        if name in self._role_changes:
            with contextlib.suppress(FleetError):
                await self._role_changes.join(name)
        await supervisor.replace_draining()

    def _begin_incarnation(self, name: str) -> int:
        replica = self._desired.replicas[name]
        replica.num_starts += 1
        self._save()
        return replica.num_starts

    async def _remove(self, name: str) -> None:
        """Removes the replica of a worker that was drained."""
        if (task := self._tasks.pop(name, None)) is None:
            return
        await end_tasks(task)
        self._launcher.forget(name)
        supervisor = self._supervisors.pop(name)
        del self._desired.replicas[name]
        self._save()
        self._note(supervisor)

    def _supervisor(self, worker: str) -> Supervisor:
        supervisor = self._supervisors.get(worker)
        if supervisor is None:
            names = ", ".join(self._supervisors) or "none"
            raise UnknownWorker(f"there is no worker {worker!r}; the fleet has {names}")
        return supervisor

    def _check_not_last(self, worker: str, what: str) -> None:
        others = [replica for replica in self._desired.with_role(WorkerRole.DECODE) if replica.name != worker]
        if not any(
            self._supervisors[replica.name].takes_requests and replica.name not in self._role_changes
            for replica in others
        ):
            raise FleetError(
                f"if worker {worker} {what}, no decode worker serves any more; add a decode worker first, or wait "
                "until another one serves"
            )

    def _burden(self, supervisor: Supervisor) -> tuple[bool, int]:
        num_requests = supervisor.status.requests.total if supervisor.status else 0
        return supervisor.takes_requests, num_requests

    def _note(self, supervisor: Supervisor) -> None:
        """Applies a change of a worker to the desired fleet, the view and the start report."""
        replica, desired = supervisor.replica, self._desired.replicas.get(supervisor.replica.name)
        if (
            desired is not None
            and desired.role is not replica.role
            and replica.name not in self._role_changes
        ):
            desired.role = replica.role
            self._save()
        self._was_whole = self._was_whole or all(
            supervisor.is_serving for supervisor in self._supervisors.values()
        )
        if isinstance(supervisor.failure, ConfigError | ModelError) and not self._was_whole:
            self._failure = supervisor.failure
        endpoints = tuple(each.endpoint for each in self._supervisors.values() if each.endpoint is not None)
        if endpoints != self._view.endpoints:
            self._version += 1
            deaths = tuple(each.death for each in self._supervisors.values() if each.death is not None)
            self._view = FleetView(self._incarnation, self._version, endpoints, deaths)
        self._start_version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _save(self) -> None:
        self._store.save(self._desired.to_json())
