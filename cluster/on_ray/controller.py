"""The fleet's controller as a detached actor that Ray restarts, and how a command begins, finds and ends it.

The desired state is in Ray's key-value store. The workers are actors that outlive their controller.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError, FleetEnded
from baton.hub_name import is_pinned, leaves_revision_open
from baton.messages.control import EndFleet, GetConfiguration, WaitView
from baton.messages.control_codec import failure, read_call
from baton.system.logs import write_logs
from cluster.control_api.calls import ControlClient, InProcessControl
from cluster.control_api.configuration import (
    differences,
    for_actors,
    pack_configuration,
    unpack_configuration,
)
from cluster.controller.controller import Controller
from cluster.controller.supervisor import Patience
from cluster.on_ray.actors import Introduce, introduction_here
from cluster.on_ray.calls import as_actor
from cluster.on_ray.carrier import CONTROLLER_CODEC, CONTROLLER_NAME, RayCarrier, controller_actor
from cluster.on_ray.incarnations import fleet_of, remove_incarnations
from cluster.on_ray.launcher import RayLauncher
from cluster.on_ray.placement import HEAD
from cluster.on_ray.session import check_token
from cluster.on_ray.store import RayStore
from engine.loading.commit import with_commit

logger = logging.getLogger(__name__)

_SOME = 0.001
"""So little of a resource that all fleets of a cluster get it."""


class ControllerActor:
    """The actor of the controller. After a restart, Ray may repeat a call."""

    # Ray awaits this before the first call. An error here is raised by every call.
    async def __init__(self, config: BatonConfig, digest: str, model_path: Path) -> None:  # type: ignore[misc]
        write_logs(config.logging, component="controller", fleet=config.cluster.name)
        check_token(config.cluster)
        self._config = config
        self._fleet = fleet = fleet_of(str(ray.get_runtime_context().get_actor_id()))
        store = RayStore(config.cluster.name, fleet)
        if store.load() is None:  # the first start. Earlier fleets of this name have no controller any more
            remove_incarnations(lambda title: title.fleet != fleet)
            store.clear_others()
        launcher = RayLauncher(config, digest, model_path, fleet)
        self._controller = Controller(config, launcher, store, SystemClock())
        self._control = InProcessControl(self._controller, pack_configuration(config, model_path, digest))
        await self._controller.start()
        if config.cluster.ray_address != "local":
            self._orphan = asyncio.create_task(self._end_as_an_orphan())

    async def call(self, frame: bytes) -> bytes:
        """The reply to a control call."""
        number = 0
        try:
            call = read_call(frame)
            number = call.number
            request = CONTROLLER_CODEC.request_in(call)
            if isinstance(request, Introduce):
                return CONTROLLER_CODEC.answer(number, request, introduction_here())
            return CONTROLLER_CODEC.answer(number, request, await self._control.call(request))
        except BatonError as error:
            return failure(number, error)

    async def _end_as_an_orphan(self) -> None:
        await self._controller.orphaned()
        timeout_s = self._config.cluster.orphan_timeout_s
        logger.error(
            "neither a gateway nor an owner has called for %g s (cluster.orphan_timeout_s); ending the fleet",
            timeout_s,
        )
        await self._control.end(may_drain=False)
        remove_incarnations(lambda title: title.fleet == self._fleet)
        ray.kill(ray.get_runtime_context().current_actor)


class OwnedController:
    """The owner's handle of a fleet's controller. With this handle, the owner may end the fleet."""

    def __init__(self, actor: Any, config: BatonConfig) -> None:
        self._carrier = RayCarrier(actor, config.cluster.start_timeout_s)
        self._name, self._fleet = config.cluster.name, fleet_of(actor._actor_id.hex())
        self._store = RayStore(self._name, self._fleet)
        self.control = ControlClient(self._carrier, Patience.of(config))

    @property
    def has_answered(self) -> bool:
        return self._carrier.has_answered

    def claim(self) -> None:
        """Makes this command the fleet's owner until its process ends. ClusterError if another command is the owner."""
        if (owner := self._store.claim()) is not None:
            raise ClusterError(_in_use(self._name, owner))

    async def shutdown(self, *, may_drain: bool) -> None:
        """Ends the workers; call `end` afterwards to end the controller. Kills a controller that hangs."""
        await self._carrier.ask_or_kill(self.control.patience.unresponsive_s)
        await self.control.call(EndFleet(may_drain))

    def end(self) -> None:
        """Ends the controller and the rest of its fleet by force; a later fleet of the same name is not touched."""
        ray.kill(self._carrier.actor)
        remove_incarnations(lambda title: title.fleet == self._fleet)
        self._store.clear()


def begin_fleet(config: BatonConfig, digest: str, model_path: Path) -> OwnedController:
    """Starts a new fleet in this driver's namespace; its controller begins to start the workers.

    Raises ClusterError if a fleet of this name exists. If two commands run at the same time, Ray gives the controller's
    name to only one of them. Until its controller has this name, a command starts nothing else. Also raises
    ClusterError, and ends the new fleet, if Ray cannot store who owns it.
    """
    actor = as_actor(
        ControllerActor,
        name=CONTROLLER_NAME,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        resources=_of_head(),
    )
    try:
        begun = OwnedController(actor.remote(for_actors(config), digest, model_path), config)
    except ValueError:  # another command began a fleet since `find_fleet`
        raise ClusterError(_in_use(config.cluster.name, "it has just begun")) from None
    try:
        begun.claim()
    except ClusterError:  # another command owns it already
        raise
    except Exception as error:  # the fleet would have no owner, and would keep its devices
        begun.end()
        raise ClusterError(
            f"cannot become the owner of the new fleet '{config.cluster.name}': {error}"
        ) from error
    return begun


async def find_fleet(config: BatonConfig, digest: str, model_path: Path) -> OwnedController | None:
    """A fleet of this name that had no owner; from now on this command is its owner. None if there is no fleet.

    Kills the controller of a fleet that has ended: the owner may have died before it killed the controller. Raises
    ClusterError if the fleet is ending or in use, or if its configuration differs.
    """
    if (actor := controller_actor()) is None:
        return None
    found = OwnedController(actor, config)
    try:
        await _check_adoption(found.control, config, digest, model_path)
        found.claim()
        # Its former owner may have ended the fleet since the check, or begun to.
        await found.control.call(GetConfiguration())
        await found.control.call(WaitView("", -1, 0.0))
    except FleetEnded:
        found.end()  # Ray then frees its name
        return None
    return found


async def _check_adoption(control: ControlClient, config: BatonConfig, digest: str, model_path: Path) -> None:
    """Raises ClusterError if the fleet must not be adopted."""
    if contradictions := await _differences(control, config, digest, model_path):
        raise ClusterError(
            f"a fleet named '{config.cluster.name}' runs on this cluster with another configuration: "
            f"{'; '.join(contradictions)}. Use its configuration, or another cluster.name"
        )


async def _differences(
    control: ControlClient, config: BatonConfig, digest: str, model_path: Path
) -> list[str]:
    """How the running fleet differs from the fleet that this command would start."""
    try:
        there = await control.call(GetConfiguration())
    except FleetEnded:
        raise
    except ClusterError as error:
        raise ClusterError(
            f"a fleet named '{config.cluster.name}' is on this cluster, and cannot be adopted: {error}"
        ) from None
    their_config, their_path = unpack_configuration(there)
    is_open = leaves_revision_open(config.model.path, their_config.model.path)
    found = differences(their_config, config if is_open else with_commit(config, model_path))
    if model_path != their_path and not is_pinned(their_config.model.path):
        found.append(
            f"the model's folder is {their_path} in the running fleet, {model_path} in this configuration"
        )
    if there.keys_digest != digest:
        found.append("its cluster secret differs")
    return found


def running_fleet(config: BatonConfig) -> ControlClient | None:
    """The running fleet of this name, for another gateway; None if there is none."""
    actor = controller_actor()
    return None if actor is None else ControlClient(RayCarrier(actor), Patience.of(config))


def _in_use(name: str, owner: str) -> str:
    return (
        f"a fleet named '{name}' is in use by another command on this cluster ({owner}); use another cluster.name, or "
        "`baton gateway` for one more gateway to it"
    )


def _of_head() -> dict[str, float]:
    """A resource that only the head node has, whose loss ends the cluster anyway. Nothing without a head node.

    Ray would ignore a node affinity that is soft: it places an actor without resources on any node.
    """
    has_head = any(node["Alive"] and HEAD in node["Resources"] for node in ray.nodes())
    return {HEAD: _SOME} if has_head else {}
