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

from gateway.requests.attempt import AttemptFailure, Cause
from gateway.requests.request_state import RequestState
from gateway.routing.placement import NoRoom, Placement
from gateway.routing.router import Router
from gateway.routing.worker_estimate import WorkerEstimate

SHARE = 7 / 8
TAKE_BACK_FROM = 15 / 16
MAX_PROMPTS_S = 0.05

PRESENT_S = 60.0
"""A caller counts as present for this time after its last request."""


PLENTY = 10**9
"""The free slots of a worker that has not reported how many slots it has."""


class HeldBack(NoRoom):
    """The gateway holds the request back, although workers may have room."""


class OverShare(HeldBack):
    """The request's caller holds its share of the places, or of each decode worker with room. Other callers'
    requests may have room and need not wait."""


_States = dict[RequestState, None]
"""Requests, the oldest first."""


@dataclass(frozen=True, slots=True)
class _Holding:
    """How much of one resource a caller's requests hold, and how much is free."""

    what: str
    states: Collection[RequestState]
    """The caller's requests, the oldest first."""
    size: Callable[[RequestState], int]
    held: int
    free: int

    def to_take_back(self) -> Iterator[RequestState]:
        room = self.held + self.free
        excess = self.held - SHARE * room if self.held > TAKE_BACK_FROM * room else 0.0
        for state in reversed(list(self.states)[1:]):
            if excess <= 0.0:
                return
            excess -= self.size(state)
            yield state


class CallerShares:
    """The shares of all callers. Call it when an attempt begins and ends. Times must not run backwards."""

    def __init__(self, router: Router, max_in_flight: int) -> None:
        self._router = router
        self._max_in_flight = max_in_flight
        self._num_placed = 0
        self._seen_at: dict[str, float] = {}
        """When each present caller last had a request, the earliest first."""
        self._placed: dict[str, _States] = {}
        """The requests on workers, by caller; no entry is empty."""
        self._decoding: defaultdict[str, dict[str, _States]] = defaultdict(dict)
        """For each decode worker: the requests on this worker, by caller; no entry is empty."""
        self._in_prefill: defaultdict[str, _States] = defaultdict(dict)
        """By worker: the requests whose prompts it computes or will compute. Some stay here for a while after that."""

    def begun(self, state: RequestState) -> None:
        """An attempt has begun."""
        self._num_placed += 1
        placement = state.attempt.placement
        for placed in (self._placed, self._decoding[placement.decode]):
            placed.setdefault(state.request.caller.name, {})[state] = None
        self._in_prefill[placement.prefill or placement.decode][state] = None

    def ended(self, state: RequestState, now: float) -> None:
        """The request's latest attempt has ended."""
        name = state.request.caller.name
        self._num_placed -= 1
        self._seen(name, now)
        decode, prefill = state.attempt.placement.decode, state.attempt.placement.prefill
        for placed in (self._placed, self._decoding[decode]):
            del placed[name][state]
            if not placed[name]:
                del placed[name]
        self._in_prefill[prefill or decode].pop(state, None)
        if not self._decoding[decode]:
            del self._decoding[decode]
        if not self._in_prefill[prefill or decode]:
            del self._in_prefill[prefill or decode]

    def arrived(self, name: str, now: float) -> bool:
        """A caller sent a request. Returns True if only one caller was present before, and now two are."""
        was_shared = self._is_shared(now)
        self._seen(name, now)
        return not was_shared and self._is_shared(now)

    def refusal(self, state: RequestState, now: float) -> NoRoom | None:
        """Why the request gets no place on any worker; None if it may have one."""
        name = state.request.caller.name
        self._seen(name, now)
        if self._is_shared(now) and (no_share := _refusal(name, 1, self._places(name))):
            return no_share
        if self._num_placed >= self._max_in_flight:
            return HeldBack(f"{self._num_placed} requests are with workers, which is the limit")
        return None

    def over_share(self, callers: Iterable[str], now: float) -> set[str]:
        """The callers that hold their share of the places: `refusal` refuses all their requests."""
        if not self._is_shared(now):
            return set()
        free, none = self._max_in_flight - self._num_placed, dict[RequestState, None]()
        return {name for name in callers if not _may_take(1, len(self._placed.get(name, none)), free)}

    def refusal_at(self, state: RequestState, now: float, decode: str) -> NoRoom | None:
        """Why the request must not go to a decode worker with room; None if it may."""
        if not self._is_shared(now):
            return None
        name, slots, blocks = state.request.caller.name, self._slots, self._blocks
        num_blocks = _num_blocks(self._router.estimate(decode), state)
        return _refusal(name, 1, slots(name, decode)) or _refusal(name, num_blocks, blocks(name, decode))

    def too_many_prompts(self, placement: Placement, now: float) -> NoRoom | None:
        """Why the placement's prompt must not go to its worker at present; None if it may."""
        if not self._is_shared(now):
            return None
        worker = placement.prefill or placement.decode
        if self._prompts_s(_before(placement, self._prompts_at(worker)), worker) > MAX_PROMPTS_S:
            return HeldBack(f"other prompts wait at {worker}")
        return None

    def to_take_back(self, workers: Iterable[str], now: float) -> list[tuple[RequestState, AttemptFailure]]:
        """Requests to take back from callers that hold too much, since answers grew or other callers appeared.

        Of each resource, only the caller that holds most loses requests. This increases the room of the other callers.
        """
        if not self._is_shared(now) or not self._placed:
            return []
        largest = max(self._placed, key=lambda name: len(self._placed[name]))
        back = dict.fromkeys(self._places(largest).to_take_back())
        for worker in workers:  # keeps their order
            if worker in self._decoding:
                for holding_of in (self._slots, self._blocks):
                    holdings = (holding_of(name, worker) for name in self._decoding[worker])
                    back |= dict.fromkeys(max(holdings, key=attrgetter("held")).to_take_back())
            back |= dict.fromkeys(self._late_prompts(worker))
        return [(state, _taken_back(state)) for state in back]

    def _seen(self, name: str, now: float) -> None:
        self._seen_at.pop(name, None)
        self._seen_at[name] = now

    def _is_shared(self, now: float) -> bool:
        while self._seen_at and now - next(iter(self._seen_at.values())) > PRESENT_S:
            name = next(iter(self._seen_at))
            if name in self._placed:
                self._seen(name, now)
            else:
                del self._seen_at[name]
        return len(self._seen_at) > 1

    def _places(self, name: str) -> _Holding:
        states, free = self._placed.get(name, {}), self._max_in_flight - self._num_placed
        return _Holding("places", states, lambda _: 1, len(states), free)

    def _slots(self, name: str, decode: str) -> _Holding:
        here, worker = self._decoding_of(name, decode), self._router.estimate(decode)
        num_slots = worker.status.max_num_seqs
        free = num_slots - worker.num_requests if num_slots else PLENTY
        return _Holding(f"slots of {decode}", here, lambda _: 1, len(here), free)

    def _blocks(self, name: str, decode: str) -> _Holding:
        here, worker = self._decoding_of(name, decode), self._router.estimate(decode)
        size = partial(_num_blocks, worker)
        used = worker.status.kv_blocks.total - max(0, worker.room)
        held = min(sum(map(size, here)), used)  # requests may share blocks
        return _Holding(f"blocks of {decode}", here, size, held, worker.room)

    def _decoding_of(self, name: str, worker: str) -> _States:
        return self._decoding.get(worker, {}).get(name, {})

    def _prompts_at(self, worker: str) -> _States:
        """The requests whose prompts this worker computes, or has not begun to compute."""
        states = self._in_prefill.get(worker, {})
        for state in [each for each in states if each.num_output_tokens > each.attempt.num_tokens_before]:
            del states[state]
        return states

    def _late_prompts(self, worker: str) -> Iterator[RequestState]:
        """Requests to take back, since they wait behind far too many prompts at a worker: the youngest requests of the
        caller whose prompts take longest. Such requests exist, for example, if this caller was alone before.
        """
        others, waiting = dict(self._prompts_at(worker)), defaultdict[str, list[RequestState]](list)
        for state in others:
            waiting[state.request.caller.name].append(state)
        largest = max(waiting.values(), key=lambda mine: self._prompts_s(mine, worker), default=[])
        for state in reversed(largest[1:]):
            del others[state]
            if self._prompts_s(_before(state.attempt.placement, others), worker) > 2 * MAX_PROMPTS_S:
                yield state
            else:
                others[state] = None

    def _prompts_s(self, states: Iterable[RequestState], worker: str) -> float:
        return self._router.prompt_s(
            worker, sum(state.attempt.placement.num_prefill_tokens for state in states)
        )


def _may_take(number: int, held: int, free: int) -> bool:
    return not held or held + number <= SHARE * (held + free)


def _before(placement: Placement, others: Iterable[RequestState]) -> Iterator[RequestState]:
    """The requests of `others` whose prompts the placement's worker computes first: a decode worker computes prompts in
    order of arrival, a prefill worker shorter ones first. With `scheduler.policy: priority`, workers use another
    order, which does not count here."""
    for other in others:
        num_tokens = other.attempt.placement.num_prefill_tokens
        if placement.prefill is None or num_tokens <= placement.num_prefill_tokens:
            yield other


def _refusal(name: str, number: int, holding: _Holding) -> OverShare | None:
    if _may_take(number, holding.held, holding.free):
        return None
    return OverShare(f"'{name}' holds {holding.held} {holding.what}, and other callers may need the rest")


def _taken_back(state: RequestState) -> AttemptFailure:
    why = "its caller held more than its share, and other callers have requests"
    return AttemptFailure(state.attempt.placement.decode, Cause.GIVEN_BACK, why, is_taken_back=True)


def _num_blocks(worker: WorkerEstimate, state: RequestState) -> int:
    """How many blocks of a decode worker the request needs for its tokens and the next one."""
    return worker.num_blocks_for(len(state.request.prompt_token_ids) + state.num_output_tokens + 1)
