"""Room for workers: one placement group for the whole fleet, one bundle per worker; knows no worker.

A group is granted whole or not at all, so two fleets that want the same cluster cannot starve each other half-way.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.worker import WorkerRole

Bundle = dict[str, float]


def bundle_of(config: BatonConfig, role: WorkerRole) -> Bundle:
    """What one worker of this role asks of Ray, for all its ranks: they share a host, so they share a bundle."""
    num_ranks = config.num_ranks(role)
    bundle: Bundle = {"CPU": config.cluster.cpus_per_worker * num_ranks}
    if config.engine.device == "cuda":
        bundle["GPU"] = float(num_ranks)
    return bundle


async def reserve(bundles: Sequence[Bundle], timeout_s: float, may_grow: bool) -> PlacementGroup:
    """Room for one worker per bundle, spread over as many nodes as there are.

    ClusterError says what was asked and what is there: at once if the cluster `may_grow` no more, else (an
    autoscaler may be adding nodes) after `timeout_s`.
    """
    if not may_grow and not fits(bundles, (node["Resources"] for node in ray.nodes() if node["Alive"])):
        raise ClusterError(_no_room(bundles))
    group: PlacementGroup = placement_group(list(bundles), strategy="SPREAD")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        raise ClusterError(f"{_no_room(bundles)}; waited {timeout_s:.0f} s") from None
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def fits(bundles: Sequence[Bundle], nodes: Iterable[Bundle]) -> bool:
    """Whether the bundles find room on nodes that are otherwise empty, each on one node.

    The largest are placed first, each where it first fits. That is exact on one node, which is all that a cluster has
    whose size is settled; over several nodes it may overlook a way to place unequal bundles.
    """
    slack = 1e-6  # 3 * 0.1 is a little more than 0.3
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda bundle: sorted(bundle.items()), reverse=True):
        for node in free:
            if all(node.get(name, 0.0) + slack >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def _no_room(bundles: Sequence[Bundle]) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any("GPU" in bundle for bundle in bundles) and not any("GPU" in node["Resources"] for node in nodes):
        return "engine.device: got 'cuda', but Ray finds no GPU on any node of the cluster"
    free = Counter[str](ray.available_resources())
    kinds = Counter(_describe(bundle) for bundle in bundles)
    fleet = " and ".join(f"{count} workers of {kind} each" for kind, count in kinds.items())
    return (
        f"the Ray cluster has no room for {fleet}: {len(nodes)} nodes, "
        f"free {_describe({name: free[name] for name in ('CPU', 'GPU')})}. Ask for fewer workers "
        "(cluster.prefill, cluster.decode), for less per worker (cluster.cpus_per_worker, "
        "engine.tensor_parallel), or add nodes"
    )


def _describe(resources: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
