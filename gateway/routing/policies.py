"""Policies: which of the candidate workers gets a request. Candidates start with the next in turn, so equals share
the load."""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Protocol

from gateway.routing.cost import CostModel, Need
from gateway.routing.worker_snapshot import WorkerSnapshot

NUM_JOINT = 8
"""How many prefill and decode workers, the best by themselves, are compared in pairs. In smaller fleets, all pairs
are compared."""

Workers = Sequence[WorkerSnapshot]


class Policy(Protocol):
    """Lists are never empty."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        """The workers for prefill and decode."""
        ...

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        """The worker for both."""
        ...


class RoundRobin:
    """Workers in turn."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        return prefills[0], decodes[0]

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        return decodes[0]


class LeastLoaded:
    """Workers with the fewest requests, whatever their size."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        return min(prefills, key=_num_requests), min(decodes, key=_num_requests)

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        return min(decodes, key=_num_requests)


class KVAware:
    """Workers that cost the least time, given their prefix caches; both are chosen together."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        costs = self._costs
        prefills = nsmallest(NUM_JOINT, prefills, key=lambda each: costs.prefill_s(each, need))
        decodes = nsmallest(NUM_JOINT, decodes, key=lambda each: costs.receiver_s(each, need))
        pairs = ((prefill, decode) for prefill in prefills for decode in decodes)
        return min(pairs, key=lambda pair: costs.pair_s(pair[0], pair[1], need))

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        return min(decodes, key=lambda each: self._costs.local_s(each, need))


def _num_requests(worker: WorkerSnapshot) -> int:
    return worker.num_requests
