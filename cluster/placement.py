"""Room for workers: one placement group for the whole fleet, one bundle per worker; knows no worker.

A group is granted whole or not at all, so two fleets that want the same cluster cannot starve each other half-way.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from baton.config import BatonConfig
from baton.errors import ClusterError

Bundle = dict[str, float]


def bundle_of(config: BatonConfig) -> Bundle:
    """What one worker asks of Ray."""
    bundle: Bundle = {"CPU": config.cluster.cpus_per_worker}
    if config.engine.device == "cuda":
        bundle["GPU"] = 1.0
    return bundle


async def reserve(bundle: Bundle, count: int, timeout_s: float, may_grow: bool) -> PlacementGroup:
    """Room for `count` workers, spread over as many nodes as there are.

    ClusterError says what was asked and what is there: at once if the cluster `may_grow` no more, else (an
    autoscaler may be adding nodes) after `timeout_s`.
    """
    if not may_grow and not fits(bundle, count, (node["Resources"] for node in ray.nodes() if node["Alive"])):
        raise ClusterError(_no_room(bundle, count))
    group: PlacementGroup = placement_group([bundle] * count, strategy="SPREAD")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        raise ClusterError(f"{_no_room(bundle, count)}; waited {timeout_s:.0f} s") from None
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def fits(bundle: Bundle, count: int, nodes: Iterable[Bundle]) -> bool:
    """Whether `count` bundles find room on nodes that are otherwise empty."""
    slack = 1e-6  # 0.3 / 0.1 is a little less than 3
    room = sum(
        math.floor(min(node.get(name, 0.0) / amount for name, amount in bundle.items()) + slack)
        for node in nodes
    )
    return room >= count


def _no_room(bundle: Bundle, count: int) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = Counter[str](ray.available_resources())
    per_worker = _describe(bundle)
    return (
        f"the Ray cluster has no room for {count} workers of {per_worker} each: {len(nodes)} nodes, "
        f"free {_describe({name: free[name] for name in ('CPU', 'GPU')})}. Ask for fewer workers "
        "(cluster.prefill, cluster.decode), for less per worker (cluster.cpus_per_worker), or add nodes"
    )


def _describe(resources: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
