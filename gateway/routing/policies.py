"""Which of the workers that could take a request gets it. Each policy is asked with a list that begins with whose turn
it is, so that among equals each gets its share."""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Protocol

from gateway.routing.cost import CostModel, Need
from gateway.routing.worker_snapshot import WorkerSnapshot

NUM_JOINT = 8
"""So many prefill workers, and as many decode workers, are looked at in pairs: those that are best by themselves. In
a fleet of at most so many of each, every pair is."""

Workers = Sequence[WorkerSnapshot]


class Policy(Protocol):
    """Lists are never empty."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        """Who computes the prompt, and who goes on."""
        ...

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        """Who does both."""
        ...


class RoundRobin:
    """Whose turn it is."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        return prefills[0], decodes[0]

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        return decodes[0]


class LeastLoaded:
    """Who has the fewest requests, whatever their size."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers) -> tuple[WorkerSnapshot, WorkerSnapshot]:
        return min(prefills, key=_num_requests), min(decodes, key=_num_requests)

    def local(self, need: Need, decodes: Workers) -> WorkerSnapshot:
        return min(decodes, key=_num_requests)


class KVAware:
    """Who costs the least time, given what each has in its prefix cache: one choice of both workers."""

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
