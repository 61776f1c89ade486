"""Room for workers on Ray's nodes: the resources of a worker, the choice of its node, and errors for lack of room."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.worker import WorkerRole
from cluster.controller.cpu_shares import most_workers

Bundle = dict[str, float]

HEAD = "node:__internal_head__"
"""The resource by which Ray marks the head node."""

_SLACK = 1e-6  # 3 * 0.1 is a little more than 0.3


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A live node as a place for a worker."""

    node_id: str
    is_head: bool
    free: Mapping[str, float]
    labels: Mapping[str, str]
    num_workers: int
    """The number of this fleet's workers that are on this node, or are about to start there."""
    is_draining: bool = False
    """The node gets no more workers."""
    host: str = ""
    """The machine of this node; several nodes may share one."""
    total: Mapping[str, float] = field(default_factory=dict)
    """The node's resources when it is empty. A head that only manages the cluster offers no CPUs."""


def bundle_of(config: BatonConfig, role: WorkerRole) -> Bundle:
    """The resources of one worker of this role, for all its ranks: ranks share a host, so they share a bundle."""
    num_ranks = config.num_ranks(role)
    bundle: Bundle = {"CPU": config.cluster.cpus_per_worker * num_ranks}
    if config.engine.device == "cuda":
        bundle["GPU"] = float(num_ranks)
    cluster = config.cluster
    return bundle | (cluster.prefill_resources if role is WorkerRole.PREFILL else cluster.decode_resources)


def labels_of(config: BatonConfig, role: WorkerRole) -> dict[str, str]:
    """The labels that the node of a worker of this role must have."""
    cluster = config.cluster
    return dict(cluster.prefill_labels if role is WorkerRole.PREFILL else cluster.decode_labels)


def labels_text(config: BatonConfig) -> str:
    """The end of the message `no_room` if workers need nodes with certain labels; else empty."""
    text = ""
    for role in WorkerRole:
        if labels := ", ".join(f"{name}: {value}" for name, value in labels_of(config, role).items()):
            text += f"; {role.value} workers go to nodes with labels {{{labels}}} only (cluster.{role.value}_labels)"
    return text


def choose_node(
    bundle: Bundle, labels: Mapping[str, str], rooms: Iterable[NodeRoom], failed_on: Collection[str] = ()
) -> str | None:
    """The preferred node: the one with the fewest workers of the fleet, and the head only if no other node has room.

    `failed_on`: the nodes where the worker failed to start. Other nodes but the head are preferred to them.

    None leaves the choice to Ray: no node has room at present, or some labels are conditions, which only Ray
    understands.
    """
    fitting = [
        room
        for room in rooms
        if not room.is_draining and _holds(room.free, bundle) and _has(room.labels, labels)
    ]
    fitting.sort(key=lambda room: (room.is_head, room.node_id in failed_on, room.num_workers, room.node_id))
    return fitting[0].node_id if fitting else None


def num_machines(config: BatonConfig, host: str, rooms: Collection[NodeRoom]) -> int:
    """The number of machines that the fleet will use when all its workers run.

    It is the larger of two numbers: how many present machines can hold a worker, and how many machines like `host` all
    workers together need for their CPUs. Machines may join the cluster after the first workers.
    """
    here = {
        room.host
        for room in rooms
        for role in WorkerRole
        if most_workers(config, role)
        and not room.is_draining
        and _holds(room.total, bundle_of(config, role))
        and (_are_conditions(labels_of(config, role)) or _has(room.labels, labels_of(config, role)))
    }
    machine = {"CPU": sum(room.total.get("CPU", 0.0) for room in rooms if room.host == host)}
    workers = [
        {"CPU": bundle_of(config, role)["CPU"]}
        for role in WorkerRole
        for _ in range(most_workers(config, role))
    ]
    needed = next(
        (count for count in range(1, len(workers)) if fits(workers, [machine] * count)), len(workers)
    )
    return max(len(here), needed)


def check_room(bundles: Sequence[Bundle]) -> None:
    """Raises ClusterError if the cluster could not hold all bundles even when it is empty."""
    if not fits(bundles, (node["Resources"] for node in ray.nodes() if node["Alive"])):
        raise ClusterError(no_room(bundles))


def fits(bundles: Sequence[Bundle], nodes: Iterable[Bundle]) -> bool:
    """Whether all bundles fit on otherwise empty nodes, each bundle on one node.

    Places the largest bundles first, each bundle on the first node with room. The result is exact for one
    node, as in a private Ray. For several nodes, it may be False although another placement of unequal
    bundles would fit.
    """
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda bundle: sorted(bundle.items()), reverse=True):
        for node in free:
            if _holds(node, bundle):
                for name, amount in bundle.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def no_room(bundles: Sequence[Bundle]) -> str:
    """Why the present cluster cannot hold these bundles."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any("GPU" in bundle for bundle in bundles) and not any("GPU" in node["Resources"] for node in nodes):
        return "engine.device: got 'cuda', but Ray finds no GPU on any node of the cluster"
    free = Counter[str](ray.available_resources())
    asked = {"CPU", "GPU"}.union(*bundles)
    kinds = Counter(_describe(bundle) for bundle in bundles)
    fleet = " and ".join(f"{count} workers of {kind} each" for kind, count in kinds.items())
    return (
        f"the Ray cluster has no room for {fleet}: {len(nodes)} nodes have "
        f"{_describe({name: free[name] for name in sorted(asked)})} free. Ask for fewer workers (cluster.prefill, "
        "cluster.decode), for less per worker (cluster.cpus_per_worker, engine.tensor_parallel), or add nodes"
    )


def _holds(node: Mapping[str, float], bundle: Bundle) -> bool:
    return all(node.get(name, 0.0) + _SLACK >= amount for name, amount in bundle.items())


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())


def _are_conditions(labels: Mapping[str, str]) -> bool:
    """Whether some labels are conditions, which only Ray understands."""
    return any(value.startswith("!") or "(" in value for value in labels.values())


def _describe(resources: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
