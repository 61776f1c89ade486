"""Workers of a fleet as actors on Ray's nodes: places new ones, and finds those that already run."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.fleet import NodeDescription
from baton.system.awake_timer import awake_timeout
from baton.system.cpus import CpuShare
from baton.worker import WorkerRole
from cluster.controller.cpu_shares import CpuShares
from cluster.controller.launcher import Found, NodeDrains
from cluster.on_ray.actors import ACTOR_THREADS, WorkerActor
from cluster.on_ray.calls import as_actor
from cluster.on_ray.incarnations import (
    RayIncarnation,
    Title,
    give_room_back,
    node_name,
    parse_title,
    titles_with_room,
)
from cluster.on_ray.placement import HEAD, NodeRoom, bundle_of, choose_node, labels_of, num_machines

logger = logging.getLogger(__name__)

_NODE_ID = "ray.io/node-id"
"""A label that Ray gives each node."""


class RayLauncher:
    """See cluster.controller.launcher.Launcher. Ray's autoscaler sees which incarnations wait for room."""

    def __init__(self, config: BatonConfig, digest: str, model_path: Path, fleet: str) -> None:
        """`digest`: the digest of the keys that each worker derives on its node. `fleet`: see Title."""
        self._config = config
        self._digest = digest
        self._model_path = model_path
        self._fleet = fleet
        self._shares = CpuShares(config)
        self._avoided: tuple[str, ...] = ()
        self._incarnations: list[RayIncarnation] = []
        """The incarnations of all workers. A worker may have two of them, if the next one starts while the present one
        serves."""
        self._failed_on: dict[str, set[str]] = {}
        """Where the last incarnations of a worker failed to start, by worker name: the ids of nodes."""

    async def place(self, name: str, role: WorkerRole, number: int) -> RayIncarnation:
        rooms = await self._rooms()
        self._forget_ended()
        bundle, labels = bundle_of(self._config, role), labels_of(self._config, role)
        failed_on = self._failed_on.get(name, set())
        target = choose_node(bundle, labels, rooms, failed_on)
        if target in failed_on:  # no other node is left
            failed_on.clear()
        avoided = [room.node_id for room in rooms if room.is_draining]
        title = Title(name, number, self._fleet)
        incarnation = RayIncarnation(title, self._create_actor(title, role, target, avoided), target)
        self._incarnations.append(incarnation)
        try:
            introduction = await incarnation.introduce()
            if self._config.engine.device == "cpu":
                host, rooms = introduction.host, await self._rooms()  # again: nodes may have joined meanwhile
                alive = [other.name for other in self._alive if other.host == host]
                num_nodes = num_machines(self._config, host, rooms)
                incarnation.share = self._shares.reserve(
                    name, role, host, introduction.machine, alive, num_nodes
                )
            if incarnation.node in self._avoided:
                raise NodeDrains(
                    f"its node {incarnation.node} began to drain while the worker waited for room there"
                )
        except BaseException:
            await incarnation.stop(0.0)
            raise
        return incarnation

    async def has_room(self, role: WorkerRole) -> bool:
        bundle, labels = bundle_of(self._config, role), labels_of(self._config, role)
        return choose_node(bundle, labels, await self._rooms()) is not None

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:
        titles = [title for title in map(parse_title, ray.util.list_named_actors()) if self._is_ours(title)]
        adopted = await asyncio.gather(*[self._adopt_one(title, patience_s) for title in titles])
        found: dict[str, Found] = {}
        for each in sorted(filter(None, adopted), key=lambda each: each.incarnation.number):
            if (former := found.get(each.incarnation.name)) is not None:
                await former.incarnation.stop(0.0)
            found[each.incarnation.name] = each
        kept = {Title(name, each.incarnation.number, self._fleet) for name, each in found.items()}
        for title in titles_with_room():
            if self._is_ours(title) and title not in kept:
                give_room_back(str(title))
        return found

    def avoid(self, nodes: Sequence[str]) -> None:
        self._avoided = tuple(nodes)

    def forget(self, name: str) -> None:
        self._forget_ended()
        self._failed_on.pop(name, None)
        self._shares.forget(name)

    async def nodes(self) -> tuple[NodeDescription, ...]:
        nodes = await asyncio.to_thread(ray.nodes)
        return tuple(self._describe(node) for node in nodes)

    def _create_actor(
        self, title: Title, role: WorkerRole, target: str | None, avoided: Sequence[str]
    ) -> Any:
        """Creates the actor, which waits for room if necessary. `avoided`: node ids where it must not run."""
        bundle, labels = bundle_of(self._config, role), labels_of(self._config, role)
        if avoided:
            labels[_NODE_ID] = f"!in({','.join(avoided)})"
        group = placement_group(
            [bundle],
            strategy="STRICT_PACK",
            name=str(title),
            lifetime="detached",
            _soft_target_node_id=target,
            bundle_label_selector=[labels] if labels else None,
        )
        worker = as_actor(
            WorkerActor,
            name=str(title),
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            max_concurrency=ACTOR_THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        return worker.remote(self._config, self._digest, self._model_path, role, title.worker)

    def _forget_ended(self) -> None:
        """Forgets ended incarnations, but remembers the nodes on which they failed to start."""
        for each in self._incarnations:
            if each.failed_to_start:
                assert each.node_id is not None  # it has introduced itself
                self._failed_on.setdefault(each.name, set()).add(each.node_id)
            elif each.is_over:
                self._failed_on.pop(each.name, None)
        self._incarnations = self._alive

    def _is_ours(self, title: Title | None) -> TypeGuard[Title]:
        return title is not None and title.fleet == self._fleet

    async def _adopt_one(self, title: Title, patience_s: float) -> Found | None:
        """Adopts an incarnation that the fleet's former controller began, or ends it if it does not serve."""
        try:
            incarnation = RayIncarnation(title, ray.get_actor(str(title)), None)
        except ValueError:
            return None
        try:
            async with awake_timeout(patience_s):
                introduction = await incarnation.introduce()
            if introduction.endpoint is not None:
                endpoint = introduction.endpoint
                self._incarnations.append(incarnation)
                share = CpuShare(endpoint.num_threads, endpoint.cpus)
                self._shares.note(title.worker, introduction.host, share)
                return Found(incarnation, endpoint, introduction.status)
        except (TimeoutError, ClusterError) as error:
            logger.warning("worker %s was not adopted: %s", title, error or f"silent for {patience_s:g} s")
        await incarnation.stop(0.0)
        return None

    async def _rooms(self) -> list[NodeRoom]:
        """All live nodes. `num_workers` of a node includes workers that wait for their process: Ray may not count these
        yet."""
        nodes, free = await asyncio.gather(
            asyncio.to_thread(ray.nodes), asyncio.to_thread(available_resources_per_node)
        )
        num_workers = Counter(incarnation.node_id for incarnation in self._alive)
        return [
            NodeRoom(
                node_id=node["NodeID"],
                is_head=HEAD in node["Resources"],
                free=free.get(node["NodeID"], {}),
                labels=node["Labels"],
                num_workers=num_workers[node["NodeID"]],
                is_draining=node_name(node["NodeManagerHostname"], node["NodeID"]) in self._avoided,
                host=node["NodeManagerHostname"],
                total=node["Resources"],
            )
            for node in nodes
            if node["Alive"]
        ]

    def _describe(self, node: dict[str, Any]) -> NodeDescription:
        resources, name = node["Resources"], node_name(node["NodeManagerHostname"], node["NodeID"])
        return NodeDescription(
            name=name,
            address=node["NodeManagerAddress"],
            is_alive=node["Alive"],
            is_head=HEAD in resources,
            is_draining=name in self._avoided,
            resources=tuple(
                (name, amount)
                for name, amount in sorted(resources.items())
                if not name.startswith("node:") and name not in ("memory", "object_store_memory")
            ),
            workers=tuple(
                sorted(
                    {incarnation.name for incarnation in self._alive if incarnation.node_id == node["NodeID"]}
                )
            ),
        )

    @property
    def _alive(self) -> list[RayIncarnation]:
        return [incarnation for incarnation in self._incarnations if not incarnation.is_over]
