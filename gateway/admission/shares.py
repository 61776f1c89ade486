"""CallerShares: how much of the fleet one caller may hold while other callers have requests; pure.

Callers share this gateway's places, the slots and blocks of each decode worker, and the time of workers that compute
prompts. A caller's room is what it holds plus what is free:

    takes        a caller may take more as long as it then holds at most 7/8 of its room
    taken back   if a caller holds more than 15/16 of its room, its youngest requests return to the queue. Its
                 oldest request stays
    prompts      a prompt may wait at a worker behind at most MAX_PROMPTS_S of other prompts. Otherwise it
                 waits in the fair queue. A prefill worker computes shorter prompts first, so longer prompts
                 there do not count. They do not count with `scheduler.policy: priority` either, although
                 workers use another order then

So each of k callers that want everything gets 7 / (7k + 1), and 1 / (7k + 1) stays free for the next caller
(dynamic thresholds: Choudhury, Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998). A caller that holds nothing may take everything that is free. A caller that is alone may hold
everything.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from gateway.routing.placement import NoRoom, Placement
from gateway.routing.router import Router
from gateway.routing.worker_estimate import WorkerEstimate

SHARE = 7 / 8
TAKE_BACK_FROM = 15 / 16
MAX_PROMPTS_S = 0.05

PRESENT_S = 60.0
"""A caller counts as present for this time after its last request."""


PLENTY = 10**9
"""Assumed number of free slots of a worker that has not reported how many slots it has."""


class HeldBack(NoRoom):
    """The gateway holds the request back, although workers may have room."""


class OverShare(HeldBack):
    """The request's caller holds its share of the places, or of each decode worker with room. Other callers'
    requests may have room and need not wait."""


class SharingRequest(Protocol):
    """What the shares must know of a request."""

    @property
    def caller(self) -> str:
        """The caller's name."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the prompt, and of the answer so far."""

    @property
    def is_in_prefill(self) -> bool:
        """Whether the request's latest attempt has not brought a token yet."""


T = TypeVar("T", bound=SharingRequest)


@dataclass(frozen=True, slots=True)
class _Holding(Generic[T]):
    """How much of one resource a caller's requests hold, and how much is free."""

    what: str
    requests: Collection[T]
    """The caller's requests, the oldest first."""
    size: Callable[[T], int]
    held: int
    free: int

    def to_take_back(self) -> Iterator[T]:
        room = self.held + self.free
        excess = self.held - SHARE * room if self.held > TAKE_BACK_FROM * room else 0.0
        for request in reversed(list(self.requests)[1:]):
            if excess <= 0.0:
                return
            excess -= self.size(request)
            yield request


class CallerShares(Generic[T]):
    """The shares of all callers. Call it when an attempt begins and ends. Times must not run backwards."""

    def __init__(self, router: Router, max_in_flight: int) -> None:
        self._router = router
        self._max_in_flight = max_in_flight
        self._seen_at: dict[str, float] = {}
        """When each present caller last had a request, the earliest first."""
        self._placements: dict[T, Placement] = {}
        """The placement of each request on workers."""
        self._by_caller: dict[str, dict[T, None]] = {}
        """The requests on workers, by caller; no entry is empty."""
        self._decoding: defaultdict[str, dict[str, dict[T, None]]] = defaultdict(dict)
        """For each decode worker: the requests on this worker, by caller; no entry is empty."""
        self._in_prefill: defaultdict[str, dict[T, None]] = defaultdict(dict)
        """For each worker: the requests whose prompts it computes or will compute. A request may stay here for a while
        after its prompt was computed."""

    def begun(self, request: T, placement: Placement) -> None:
        """An attempt has begun."""
        self._placements[request] = placement
        for placed in (self._by_caller, self._decoding[placement.decode]):
            placed.setdefault(request.caller, {})[request] = None
        self._in_prefill[_prompt_at(placement)][request] = None

    def ended(self, request: T, now: float) -> None:
        """The request's attempt has ended."""
        name, placement = request.caller, self._placements.pop(request)
        self._seen(name, now)
        decode, worker = placement.decode, _prompt_at(placement)
        for placed in (self._by_caller, self._decoding[decode]):
            del placed[name][request]
            if not placed[name]:
                del placed[name]
        self._in_prefill[worker].pop(request, None)
        if not self._decoding[decode]:
            del self._decoding[decode]
        if not self._in_prefill[worker]:
            del self._in_prefill[worker]

    def arrived(self, name: str, now: float) -> bool:
        """A caller sent a request. Returns True if only one caller was present before, and now two are."""
        was_shared = self._is_shared(now)
        self._seen(name, now)
        return not was_shared and self._is_shared(now)

    def refusal(self, request: T, now: float) -> NoRoom | None:
        """Why the request gets no place on any worker; None if it may have a place."""
        name = request.caller
        self._seen(name, now)
        if self._is_shared(now) and (no_share := _refusal(name, 1, self._places(name))):
            return no_share
        if len(self._placements) >= self._max_in_flight:
            return HeldBack(f"{len(self._placements)} requests are with workers, which is the limit")
        return None

    def over_share(self, callers: Iterable[str], now: float) -> set[str]:
        """Those of `callers` that hold their share of the places, so that `refusal` refuses all their requests."""
        if not self._is_shared(now):
            return set()
        free, none = self._max_in_flight - len(self._placements), dict[T, None]()
        return {name for name in callers if not _may_take(1, len(self._by_caller.get(name, none)), free)}

    def refusal_at(self, request: T, now: float, decode: str) -> NoRoom | None:
        """Why the request must not go to a decode worker with room; None if it may."""
        if not self._is_shared(now):
            return None
        name, slots, blocks = request.caller, self._slots, self._blocks
        num_blocks = _num_blocks(self._router.estimate(decode), request)
        return _refusal(name, 1, slots(name, decode)) or _refusal(name, num_blocks, blocks(name, decode))

    def too_many_prompts(self, placement: Placement, now: float) -> NoRoom | None:
        """Why the placement's prompt must not go to its worker at present; None if it may."""
        if not self._is_shared(now):
            return None
        worker = _prompt_at(placement)
        if self._prompts_s(self._before(placement, self._prompts_at(worker)), worker) > MAX_PROMPTS_S:
            return HeldBack(f"other prompts wait at {worker}")
        return None

    def to_take_back(self, workers: Iterable[str], now: float) -> list[T]:
        """Requests to take back from callers that hold too much, since answers grew or other callers appeared.

        For each resource, requests are taken only from the caller that holds the most of it. This increases the room of
        the other callers.
        """
        if not self._is_shared(now) or not self._by_caller:
            return []
        largest = max(self._by_caller, key=lambda name: len(self._by_caller[name]))
        back = dict.fromkeys(self._places(largest).to_take_back())
        for worker in workers:  # in this order
            if worker in self._decoding:
                for holding_of in (self._slots, self._blocks):
                    holdings = (holding_of(name, worker) for name in self._decoding[worker])
                    back |= dict.fromkeys(max(holdings, key=attrgetter("held")).to_take_back())
            back |= dict.fromkeys(self._late_prompts(worker))
        return list(back)

    def _seen(self, name: str, now: float) -> None:
        self._seen_at.pop(name, None)
        self._seen_at[name] = now

    def _is_shared(self, now: float) -> bool:
        while self._seen_at and now - next(iter(self._seen_at.values())) > PRESENT_S:
            name = next(iter(self._seen_at))
            if name in self._by_caller:
                self._seen(name, now)
            else:
                del self._seen_at[name]
        return len(self._seen_at) > 1

    def _places(self, name: str) -> _Holding[T]:
        requests, free = self._by_caller.get(name, {}), self._max_in_flight - len(self._placements)
        return _Holding("places", requests, lambda _: 1, len(requests), free)

    def _slots(self, name: str, decode: str) -> _Holding[T]:
        here, worker = self._decoding_of(name, decode), self._router.estimate(decode)
        num_slots = worker.status.max_num_seqs
        free = num_slots - worker.num_requests if num_slots else PLENTY
        return _Holding(f"slots of {decode}", here, lambda _: 1, len(here), free)

    def _blocks(self, name: str, decode: str) -> _Holding[T]:
        here, worker = self._decoding_of(name, decode), self._router.estimate(decode)
        size = partial(_num_blocks, worker)
        used = worker.status.kv_blocks.total - max(0, worker.room)
        held = min(sum(map(size, here)), used)  # requests may share blocks
        return _Holding(f"blocks of {decode}", here, size, held, worker.room)

    def _decoding_of(self, name: str, worker: str) -> dict[T, None]:
        return self._decoding.get(worker, {}).get(name, {})

    def _prompts_at(self, worker: str) -> dict[T, None]:
        """The requests whose prompts this worker computes, or has not begun to compute."""
        requests = self._in_prefill.get(worker, {})
        for request in [each for each in requests if not each.is_in_prefill]:
            del requests[request]
        return requests

    def _before(self, placement: Placement, others: Iterable[T]) -> Iterator[T]:
        """The requests of `others` whose prompts the placement's worker computes first: a decode worker computes
        prompts in order of arrival, and a prefill worker computes shorter prompts first. With
        `scheduler.policy: priority`, workers use another order, which is ignored here."""
        for other in others:
            num_tokens = self._placements[other].num_prefill_tokens
            if placement.prefill is None or num_tokens <= placement.num_prefill_tokens:
                yield other

    def _late_prompts(self, worker: str) -> Iterator[T]:
        """Requests to take back, since they wait behind far too many prompts at a worker. All of them are the youngest
        requests of the caller whose prompts take longest there. Such requests exist, for example, if this caller was
        alone before.
        """
        others, waiting = dict(self._prompts_at(worker)), defaultdict[str, list[T]](list)
        for request in others:
            waiting[request.caller].append(request)
        largest = max(waiting.values(), key=lambda mine: self._prompts_s(mine, worker), default=[])
        for request in reversed(largest[1:]):
            del others[request]
            before = self._before(self._placements[request], others)
            if self._prompts_s(before, worker) > 2 * MAX_PROMPTS_S:
                yield request
            else:
                others[request] = None

    def _prompts_s(self, requests: Iterable[T], worker: str) -> float:
        num_tokens = sum(self._placements[request].num_prefill_tokens for request in requests)
        return self._router.prompt_s(worker, num_tokens)


def _may_take(number: int, held: int, free: int) -> bool:
    return not held or held + number <= SHARE * (held + free)


def _prompt_at(placement: Placement) -> str:
    """The worker that computes the prompt."""
    return placement.prefill or placement.decode


def _refusal(name: str, number: int, holding: _Holding[T]) -> OverShare | None:
    if _may_take(number, holding.held, holding.free):
        return None
    return OverShare(f"'{name}' holds {holding.held} {holding.what}, and other callers may need the rest")


def _num_blocks(worker: WorkerEstimate, request: T) -> int:
    """How many blocks of a decode worker the request needs for its tokens and the next one."""
    return worker.num_blocks_for(request.num_context_tokens + 1)
