"""The fleet's controller as a detached actor, which Ray restarts when it dies, and the handle by which others call it.

Its desired state lies in Ray's own key-value store, and its workers are actors that do not end with it.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetDescription, FleetView, GatewayReport, RolloutStep
from baton.system.awake_timer import awake_timeout
from baton.system.curve import ClusterKeys
from baton.system.logs import write_logs
from baton.worker import WorkerRole
from cluster.controller.control import CallTimes
from cluster.controller.controller import Controller, StartReport
from cluster.controller.desired import differences
from cluster.controller.follower import POLL_S
from cluster.controller.rollout import follow_rollout
from cluster.on_ray.calls import answer, as_actor, kill_process
from cluster.on_ray.incarnations import give_room_back, parse_title
from cluster.on_ray.launcher import RayLauncher

logger = logging.getLogger(__name__)

_NAME = "controller"
_KEY = b"desired"

_RESTART_S = 30.0
"""What a call waits beyond its own time for a controller that is being restarted."""


class RayStore:
    """Bytes in Ray's key-value store, which lives as long as the cluster. See cluster.controller.desired.Store."""

    def __init__(self, fleet: str) -> None:
        self._namespace = f"baton/{fleet}".encode()

    def load(self) -> bytes | None:
        content: bytes | None = internal_kv._internal_kv_get(_KEY, namespace=self._namespace)
        return content

    def save(self, content: bytes) -> None:
        internal_kv._internal_kv_put(_KEY, content, overwrite=True, namespace=self._namespace)

    def clear(self) -> None:
        internal_kv._internal_kv_del(_KEY, namespace=self._namespace)


class ControllerActor:
    """What runs inside the actor's process. Every call may come a second time, after a restart."""

    # Ray awaits it, and answers no call before. What it raises is raised by every call.
    async def __init__(self, config: BatonConfig, keys: ClusterKeys, model_path: Path) -> None:  # type: ignore[misc]
        write_logs(config.logging, component="controller", fleet=config.cluster.name)
        self._config, self._keys, self._model_path = config, keys, model_path
        launcher = RayLauncher(config, keys, model_path)
        self._controller = Controller(config, launcher, RayStore(config.cluster.name), SystemClock())
        await self._controller.start()
        if config.cluster.ray_address != "local":
            self._orphan = asyncio.create_task(self._end_as_an_orphan())

    async def configuration(self) -> tuple[BatonConfig, Path]:
        """As the fleet's owner said it, and the model's folder."""
        return self._config, self._model_path

    async def has_keys(self, keys: ClusterKeys) -> bool:
        return keys == self._keys

    async def differences(self, config: BatonConfig, keys: ClusterKeys, model_path: Path) -> list[str]:
        """In what another command's fleet would differ from this one."""
        found = differences(self._config, config)
        if model_path != self._model_path:
            found.append(f"the model's folder is {self._model_path} there, {model_path} here")
        if keys != self._keys:
            found.append("its cluster secret is another one")
        return found

    async def process(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def is_owned(self, within_s: float) -> bool:
        return await self._controller.is_owned(within_s)

    async def next_view(
        self, controller_incarnation: str, version: int, timeout_s: float, by_owner: bool
    ) -> FleetView:
        return await self._controller.next_view(controller_incarnation, version, timeout_s, by_owner=by_owner)

    async def next_start(self, version: int, timeout_s: float) -> StartReport:
        return await self._controller.next_start(version, timeout_s)

    async def report(self, report: GatewayReport) -> None:
        await self._controller.report(report)

    async def describe(self) -> FleetDescription:
        return await self._controller.describe()

    async def drain(self, worker: str) -> None:
        await self._controller.drain(worker)

    async def drain_node(self, node: str, timeout_s: float) -> None:
        await self._controller.drain_node(node, timeout_s)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        await self._controller.set_role(worker, role)

    async def scale(self, role: WorkerRole, count: int) -> None:
        await self._controller.scale(role, count)

    async def begin_rollout(self, workers: tuple[str, ...]) -> str:
        return await self._controller.begin_rollout(workers)

    async def rollout_step(self, rollout_id: str, index: int) -> RolloutStep | None:
        return await self._controller.rollout_step(rollout_id, index)

    async def shutdown(self, may_drain: bool) -> None:
        await self._controller.shutdown(may_drain=may_drain)

    async def _end_as_an_orphan(self) -> None:
        timeout_s = self._config.cluster.orphan_timeout_s
        await self._controller.orphaned(timeout_s)
        logger.error("no gateway has asked for %g s (cluster.orphan_timeout_s): the fleet ends", timeout_s)
        await self._controller.shutdown(may_drain=False)
        ray.kill(ray.get_runtime_context().current_actor)


class ControllerHandle:
    """The controller from the outside: ControllerCalls, and more. Calls wait, a bounded time, while it is restarted.

    They raise what the controller raises, and ClusterError if it is away for longer; workers serve on meanwhile.
    """

    def __init__(self, actor: Any, config: BatonConfig, *, is_owner: bool = True) -> None:
        self._actor = actor
        self._is_owner = is_owner
        self._store = RayStore(config.cluster.name)
        self._times = CallTimes.of(config)
        self._process: tuple[int, str] | None = None
        """The controller's process and node, in the life that answered last."""
        self.has_answered = False
        """Before its first answer, it may not even have a process."""

    async def next_view(self, controller_incarnation: str, version: int, timeout_s: float) -> FleetView:
        """A controller whose process hangs, as one that was stopped by a signal, is killed here: Ray restarts it.

        FleetEnded if it has ended by itself, as it does when no gateway has asked for long.
        """
        patience_s = timeout_s + self._times.unresponsive_s
        try:
            async with awake_timeout(patience_s):
                view: FleetView = await self._call(
                    timeout_s,
                    self._actor.next_view,
                    controller_incarnation,
                    version,
                    timeout_s,
                    self._is_owner,
                )
        except TimeoutError:
            await self._kill_process()
            raise ClusterError(f"the fleet's controller did not answer for {patience_s:g} s") from None
        except ClusterError as error:
            if await asyncio.to_thread(self._is_gone):
                raise FleetEnded(f"the fleet has ended: {error}") from None
            raise
        if self._process is None or view.controller_incarnation != controller_incarnation:
            self._process = await self._call(0.0, self._actor.process)
        return view

    async def next_start(self, version: int, timeout_s: float) -> StartReport:
        report: StartReport = await self._call(timeout_s, self._actor.next_start, version, timeout_s)
        return report

    async def report(self, report: GatewayReport) -> None:
        await self._call(0.0, self._actor.report, report)

    async def describe(self) -> FleetDescription:
        description: FleetDescription = await self._call(0.0, self._actor.describe)
        return description

    async def drain(self, worker: str) -> None:
        await self._call(self._times.order_s, self._actor.drain, worker)

    async def drain_node(self, node: str, timeout_s: float) -> None:
        await self._call(timeout_s, self._actor.drain_node, node, timeout_s)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        await self._call(self._times.order_s, self._actor.set_role, worker, role)

    async def scale(self, role: WorkerRole, count: int) -> None:
        await self._call(self._times.order_s, self._actor.scale, role, count)

    def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        return follow_rollout(self, workers)

    async def begin_rollout(self, workers: tuple[str, ...]) -> str:
        rollout_id: str = await self._call(0.0, self._actor.begin_rollout, workers)
        return rollout_id

    async def rollout_step(self, rollout_id: str, index: int) -> RolloutStep | None:
        step: RolloutStep | None = await self._call(
            self._times.renew_s, self._actor.rollout_step, rollout_id, index
        )
        return step

    async def shutdown(self, *, may_drain: bool) -> None:
        """Ends the workers. `end` does the rest. A controller that hangs is not waited for, but killed."""
        try:
            async with awake_timeout(self._times.unresponsive_s):
                await answer(self._actor.process.remote(), "the fleet's controller")
        except TimeoutError:
            await self._kill_process()
            raise ClusterError(
                f"the fleet's controller did not answer for {self._times.unresponsive_s:g} s"
            ) from None
        await self._call(self._times.order_s, self._actor.shutdown, may_drain)

    def end(self) -> None:
        """Ends the controller, and whatever it has left, by force. A later fleet of the same name is left alone."""
        named = _controller()
        ray.kill(self._actor)
        if named is None or self._is_ours(named):
            _remove_lives()
            self._store.clear()

    async def differences(self, config: BatonConfig, keys: ClusterKeys, model_path: Path) -> list[str]:
        found: list[str] = await self._call(0.0, self._actor.differences, config, keys, model_path)
        return found

    async def is_owned(self, within_s: float) -> bool:
        return bool(await self._call(within_s, self._actor.is_owned, within_s))

    async def configuration(self) -> tuple[BatonConfig, Path]:
        config, model_path = await self._call(0.0, self._actor.configuration)
        return config, model_path

    def with_config(self, config: BatonConfig) -> "ControllerHandle":
        """Of the same controller, for somebody who has learnt its configuration."""
        return ControllerHandle(self._actor, config, is_owner=self._is_owner)

    async def has_keys(self, keys: ClusterKeys) -> bool:
        return bool(await self._call(0.0, self._actor.has_keys, keys))

    def _is_gone(self) -> bool:
        """For good: an actor that is restarted keeps its name."""
        named = _controller()
        return named is None or not self._is_ours(named)

    def _is_ours(self, actor: Any) -> bool:
        return bool(actor._actor_id == self._actor._actor_id)

    async def _kill_process(self) -> None:
        if self._process is not None:
            await kill_process(*self._process)

    async def _call(self, timeout_s: float, method: Any, *arguments: object) -> Any:
        """Ray itself repeats a call to an actor that it restarts, see `max_task_retries` below."""
        bound_s = timeout_s + _RESTART_S
        try:
            async with awake_timeout(bound_s):
                value = await answer(method.remote(*arguments), "the fleet's controller")
        except TimeoutError:
            raise ClusterError(
                f"the fleet's controller did not answer for {bound_s:g} s; the workers serve on without it"
            ) from None
        self.has_answered = True
        return value


def begin_fleet(config: BatonConfig, keys: ClusterKeys, model_path: Path) -> ControllerHandle:
    """A new fleet in this driver's namespace, whose controller begins to start the workers.

    ClusterError if there is one of its name.
    """
    _remove_lives()  # of a fleet that was left without a controller
    RayStore(config.cluster.name).clear()
    actor = as_actor(
        ControllerActor,
        name=_NAME,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=_near_head(),
    )
    try:
        return ControllerHandle(actor.remote(config, keys, model_path), config)
    except ValueError:  # somebody else's, since `find_fleet` looked
        raise ClusterError(_in_use(config.cluster.name)) from None


async def find_fleet(config: BatonConfig, keys: ClusterKeys, model_path: Path) -> ControllerHandle | None:
    """A fleet of this name that was left alone; None if there is no fleet.

    ClusterError if it is in use, or is not the one that is asked for.
    """
    if (actor := _controller()) is None:
        return None
    handle = ControllerHandle(actor, config)
    name = config.cluster.name
    if found := await handle.differences(config, keys, model_path):
        raise ClusterError(
            f"a fleet named '{name}' runs on this cluster, but differently: {'; '.join(found)}. Use its "
            "configuration, or another cluster.name"
        )
    if await handle.is_owned(POLL_S + 1.0):
        raise ClusterError(_in_use(name))
    return handle


def running_fleet(config: BatonConfig) -> ControllerHandle | None:
    """The fleet of this name, whoever owns it, for a gateway beside its owner's; None if there is none at present."""
    actor = _controller()
    return None if actor is None else ControllerHandle(actor, config, is_owner=False)


def _in_use(name: str) -> str:
    return (
        f"a fleet named '{name}' is in use by another `baton serve` on this cluster; use another cluster.name, or "
        "`baton gateway` for one more gateway to it"
    )


def _controller() -> Any:
    """The actor of this driver's namespace; None if there is none."""
    try:
        return ray.get_actor(_NAME)
    except ValueError:
        return None


def _remove_lives() -> None:
    """Of the fleet in whose namespace we are, and which has no controller."""
    for title in [title for title in ray.util.list_named_actors() if parse_title(title)]:
        with contextlib.suppress(ValueError):  # it has just ended by itself
            ray.kill(ray.get_actor(title))
        give_room_back(title)


def _near_head() -> NodeAffinitySchedulingStrategy | None:
    """On the head's node, whose death ends the cluster anyway, as long as that takes it."""
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return None
