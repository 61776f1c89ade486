"""FairLine: who waits, in the order in which they are to be served; pure, and knows nothing of room.

Order: priority (lower first), then those that ran already, as they came, then start-time fair queueing over callers
(Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996), each with the same weight:

    what a caller was served, in tokens, moves its next request back in virtual time
    virtual time is where whoever was served last began; a caller that comes anew begins there, so nobody saves up

So of callers that all have something waiting, none gets ahead of another by more than the largest request of each,
however many requests it has waiting. Whoever leaves unserved costs its caller nothing. Where nobody waits any more,
all is even again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What stands in line. `number` grows with each that comes."""

    @property
    def number(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def is_resumed(self) -> bool: ...
    @property
    def caller(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One caller's at one priority."""

    begins_at: float
    """Its first one, in virtual time."""
    seats: dict[T, None] = field(default_factory=dict)
    """As they came."""
    num_tokens: int = 0

    def add(self, seat: T) -> None:
        self.seats[seat] = None
        self.num_tokens += seat.num_tokens

    def remove(self, seat: T) -> None:
        del self.seats[seat]
        self.num_tokens -= seat.num_tokens


class _Level(Generic[T]):
    """Of one priority."""

    def __init__(self) -> None:
        self.resumed = _Flow[T](0.0)
        self.flows: dict[str, _Flow[T]] = {}
        self.now = 0.0
        """In virtual time."""

    @property
    def num_tokens(self) -> int:
        return self.resumed.num_tokens + sum(flow.num_tokens for flow in self.flows.values())

    @property
    def is_empty(self) -> bool:
        return not self.resumed.seats and not any(flow.seats for flow in self.flows.values())

    def flow_of(self, seat: T) -> _Flow[T]:
        return self.resumed if seat.is_resumed else self.flows[seat.caller]

    def add(self, seat: T) -> None:
        if seat.is_resumed:
            self.resumed.add(seat)
            return
        flow = self.flows.setdefault(seat.caller, _Flow(self.now))
        if not flow.seats:
            flow.begins_at = max(flow.begins_at, self.now)
        flow.add(seat)

    def charge(self, seat: T) -> None:
        if seat.is_resumed:
            return  # it was charged when it began
        flow = self.flows[seat.caller]
        self.now = max(self.now, flow.begins_at)
        flow.begins_at += seat.num_tokens

    def forget_even(self) -> None:
        """Callers that are as if they had never been here."""
        self.flows = {
            name: flow for name, flow in self.flows.items() if flow.seats or flow.begins_at > self.now
        }

    def in_order(self) -> Iterator[T]:
        yield from self.resumed.seats
        rests = [(flow.begins_at, iter(flow.seats)) for flow in self.flows.values() if flow.seats]
        heap = [(begins_at, (first := next(rest)).number, first, rest) for begins_at, rest in rests]
        heapify(heap)
        while heap:
            begins_at, _, seat, rest = heap[0]
            yield seat
            following = next(rest, None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (begins_at + seat.num_tokens, following.number, following, rest))


class FairLine(Generic[T]):
    """Must not change while somebody goes through it."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_new(self) -> int:
        """Those that never ran."""
        return self._num_waiting - sum(len(level.resumed.seats) for level in self._levels.values())

    def __contains__(self, seat: T) -> bool:
        level = self._levels.get(seat.priority)
        if level is None or (not seat.is_resumed and seat.caller not in level.flows):
            return False
        return seat in level.flow_of(seat).seats

    def __iter__(self) -> Iterator[T]:
        for priority in sorted(self._levels):
            yield from self._levels[priority].in_order()

    def add(self, seat: T) -> None:
        self._levels.setdefault(seat.priority, _Level()).add(seat)
        self._num_waiting += 1

    def remove(self, seat: T) -> None:
        """Unserved."""
        level = self._levels[seat.priority]
        level.flow_of(seat).remove(seat)
        self._num_waiting -= 1
        if level.is_empty:
            del self._levels[seat.priority]
        elif not seat.is_resumed and not level.flows[seat.caller].seats:
            level.forget_even()

    def serve(self, seat: T) -> None:
        """It has what it waited for, whether or not it was the first in order."""
        self._levels[seat.priority].charge(seat)
        self.remove(seat)

    def num_tokens_before(self, seat: T) -> int:
        """About how much is to be served before one that was added last; errs towards too little."""
        more_urgent = sum(
            level.num_tokens for priority, level in self._levels.items() if priority < seat.priority
        )
        level = self._levels[seat.priority]
        own = level.flow_of(seat)
        if seat.is_resumed:
            return more_urgent + own.num_tokens - seat.num_tokens
        own_tokens = own.num_tokens - seat.num_tokens
        begins_at = own.begins_at + own_tokens
        others = (flow for flow in level.flows.values() if flow is not own)
        share = sum(min(flow.num_tokens, max(0, int(begins_at - flow.begins_at))) for flow in others)
        return more_urgent + level.resumed.num_tokens + own_tokens + share

    def last_of_largest(self) -> T | None:
        """Of those that never ran, of the least urgent, of the caller with most of them waiting: the latest.

        Among equals, the one that came last. None if all that wait ran already.
        """
        for priority in sorted(self._levels, reverse=True):
            flows = [flow for flow in self._levels[priority].flows.values() if flow.seats]
            if flows:
                latest = [(len(flow.seats), next(reversed(flow.seats))) for flow in flows]
                return max(latest, key=lambda entry: (entry[0], entry[1].number))[1]
        return None
