"""Policies: which of the candidate workers gets a request; the first of equally good candidates wins.

The router starts the list of candidates with the next worker in turn, so equally good workers share the load.
"""

from collections.abc import Iterator, Sequence, Set
from heapq import nsmallest
from typing import Protocol

from gateway.routing.cost import CostModel, Need
from gateway.routing.placement import Pair
from gateway.routing.worker_estimate import WorkerEstimate

NUM_JOINT = 8
"""The router compares the pairs of this many prefill workers with this many decode workers: those with the least
cost of their own. In smaller fleets, all pairs are compared."""

Workers = Sequence[WorkerEstimate]
Chosen = tuple[WorkerEstimate, WorkerEstimate]


class Policy(Protocol):
    """Chooses workers from lists of candidates."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers, avoided: Set[Pair]) -> Chosen | None:
        """The workers for prefill and decode; None if every pair is avoided."""
        ...

    def local(self, need: Need, decodes: Workers) -> WorkerEstimate:
        """The decode worker that also computes the prompt."""
        ...


class RoundRobin:
    """Workers in turn."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers, avoided: Set[Pair]) -> Chosen | None:
        return next(_pairs(prefills, decodes, avoided), None)

    def local(self, need: Need, decodes: Workers) -> WorkerEstimate:
        return decodes[0]


class LeastLoaded:
    """Workers with the fewest requests, regardless of the requests' sizes."""

    def pair(self, need: Need, prefills: Workers, decodes: Workers, avoided: Set[Pair]) -> Chosen | None:
        by_load = sorted(prefills, key=_num_requests), sorted(decodes, key=_num_requests)
        return next(_pairs(*by_load, avoided), None)

    def local(self, need: Need, decodes: Workers) -> WorkerEstimate:
        return min(decodes, key=_num_requests)


class KVAware:
    """Workers with the least cost in time, given their prefix caches. The two workers are chosen together."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def pair(self, need: Need, prefills: Workers, decodes: Workers, avoided: Set[Pair]) -> Chosen | None:
        costs = self._costs
        best_prefills = nsmallest(NUM_JOINT, prefills, key=lambda each: costs.prefill_s(each, need))
        best_decodes = nsmallest(NUM_JOINT, decodes, key=lambda each: costs.receiver_s(each, need))
        pairs = list(_pairs(best_prefills, best_decodes, avoided)) or _pairs(prefills, decodes, avoided)
        return min(pairs, key=lambda pair: costs.pair_s(pair[0], pair[1], need), default=None)

    def local(self, need: Need, decodes: Workers) -> WorkerEstimate:
        return min(decodes, key=lambda each: self._costs.local_s(each, need))


def _pairs(prefills: Workers, decodes: Workers, avoided: Set[Pair]) -> Iterator[Chosen]:
    """Pairs that are not avoided; pairs of the first prefill worker come first."""
    pairs = ((prefill, decode) for prefill in prefills for decode in decodes)
    return (pair for pair in pairs if (pair[0].name, pair[1].name) not in avoided) if avoided else pairs


def _num_requests(worker: WorkerEstimate) -> int:
    return worker.num_requests
