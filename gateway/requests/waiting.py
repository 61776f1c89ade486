"""WaitingRoom: requests that no worker has room for at present, in order; pure, so that a simulation runs it too.

The order is that of gateway/requests/fair_queue.py: priority, then those that ran already before new ones, then callers
in turn. Whenever something may have made room, `sweep` asks for the first ones in line. A request that does not fit yet
lets others pass that do, so that a long prompt does not hold up short ones while its room gathers; but it looks no
further than LOOK_AHEAD that do not fit, which bounds what a sweep costs however many wait, and one that MAX_PASSED
others have passed lets nobody pass any more: then all room that is made gathers for it. A request for which there is no
worker at all holds nobody up, since room that others leave would be of no use to it.

Who is not let in, or has to go, is told when to come back. See docs/admission.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Generic, Protocol, TypeVar

from baton.errors import Overloaded, RequestError
from gateway.requests.fair_queue import FairLine
from gateway.requests.line_rate import LineRate
from gateway.routing.placement import NoRoom

LOOK_AHEAD = 8
MAX_PASSED = 64

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Traveller(Protocol):
    """What waits. None of this changes while it does, but for the time that it has."""

    @property
    def priority(self) -> int: ...

    @property
    def caller(self) -> str:
        """By name; callers of the same priority share what room there is."""
        ...

    @property
    def num_tokens(self) -> int:
        """What it is likely to cost, at least 1."""
        ...

    @property
    def is_resumed(self) -> bool:
        """It ran already."""
        ...

    def time_to_begin(self, now: float) -> float | None:
        """Until it would be too late for its deadline, if it has one."""
        ...

    def needs(self) -> object:
        """Two that need the same find a worker both or neither."""
        ...


T = TypeVar("T", bound=Traveller)


@dataclass(slots=True, eq=False)
class Seat(Generic[T]):
    """A place in the line, until it is left."""

    traveller: T
    number: int
    since: float
    priority: int = field(init=False)
    is_resumed: bool = field(init=False)
    caller: str = field(init=False)
    num_tokens: int = field(init=False)
    reason: RequestError | None = None
    """Why it has not been placed, as of the last time that somebody tried."""
    num_passed: int = 0
    """How many were placed that came after it."""

    def __post_init__(self) -> None:
        """As it was when it came: once placed, it will have run."""
        traveller = self.traveller
        self.priority, self.is_resumed = traveller.priority, traveller.is_resumed
        self.caller, self.num_tokens = traveller.caller, traveller.num_tokens


class WaitingRoom(Generic[T]):
    """`place` takes a traveller to its workers, or says why that cannot be: NoRoom, or no worker.

    `turn_away` tells one that waited that it has to go: its seat is gone already.
    """

    def __init__(
        self,
        max_queued: int,
        place: Callable[[T], RequestError | None],
        turn_away: Callable[[T, RequestError], None],
    ) -> None:
        self._max_queued = max_queued
        self._place = place
        self._turn_away = turn_away
        self._line = FairLine[Seat[T]]()
        self._rate = LineRate()
        self._num_joined = 0
        self._is_any_hopeless = False
        """Whether the last sweep found some for whom there is no worker: these neither move nor hold anybody up."""

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, seat: Seat[T]) -> bool:
        return seat in self._line

    @property
    def oldest_since(self) -> float | None:
        """When the one came that waits longest."""
        return min((seat.since for seat in self._line), default=None)

    def join(self, traveller: T, now: float) -> Seat[T] | None:
        """Places it, if it is its turn and there is room: then None. Else the seat that it waits on.

        Overloaded if it would wait beyond its deadline. If no seat is left, the latest of the caller that has most of
        them has to go, among the least urgent: another one, or this one, which then is Overloaded, or hears what keeps
        it from being placed if that is no want of room. One that ran already always finds a seat, and takes none of
        these: there are no more of them than were placed once.
        """
        self._advance(now)
        self._num_joined += 1
        seat = Seat(traveller, self._num_joined, now)
        self._line.add(seat)
        if self._is_in_sight(seat):  # else nothing has changed for those that come before it
            self.sweep(now)
        if seat not in self._line:
            return None
        if not seat.is_resumed:
            self._check_deadline(seat, now)
            self._make_room_for(seat)
        return seat

    def leave(self, seat: Seat[T], now: float) -> None:
        """It does not wait any more; no error if it was placed."""
        if seat in self._line:
            self._advance(now)
            self._line.remove(seat)

    def sweep(self, now: float) -> None:
        """Something may have made room: places whoever can be, in order."""
        self._advance(now)
        is_line = len(self._line) > 1
        placed: list[Seat[T]] = []
        try:
            self._place_first_ones(placed)
        finally:
            for seat in placed:
                self._line.serve(seat)
                if is_line or seat.since < now:
                    self._rate.placed(seat.num_tokens)

    def retry_after_s(self, seat: Seat[T]) -> float:
        """When one that waits had better come back if it waits no longer: about when it would have been served."""
        num_tokens = self._line.num_tokens_before(seat) + seat.num_tokens
        return min(max(self._rate.likely_wait_s(num_tokens), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _place_first_ones(self, placed: list[Seat[T]]) -> None:
        held_up: list[Seat[T]] = []
        hopeless: dict[object, RequestError] = {}
        """Needs that no worker meets at present, and why not."""
        for seat in self._line:
            needs = seat.traveller.needs()
            if (reason := hopeless.get(needs)) is not None:
                seat.reason = reason
                continue
            seat.reason = self._place(seat.traveller)
            if seat.reason is None:
                placed.append(seat)
                for passed in held_up:
                    passed.num_passed += 1
            elif not isinstance(seat.reason, NoRoom):
                hopeless[needs] = seat.reason
                self._is_any_hopeless = True
            else:
                held_up.append(seat)
                if len(held_up) == LOOK_AHEAD or seat.num_passed >= MAX_PASSED:
                    return
        self._is_any_hopeless = bool(hopeless)

    def _is_in_sight(self, seat: Seat[T]) -> bool:
        """Whether a sweep may come as far, with as many before it as there is no room for."""
        before = takewhile(lambda other: other is not seat, self._line)
        held_up = (other for other in before if other.reason is None or isinstance(other.reason, NoRoom))
        return len(list(islice(held_up, LOOK_AHEAD))) < LOOK_AHEAD

    def _check_deadline(self, seat: Seat[T], now: float) -> None:
        """Overloaded, and not in line any more, if its turn will come too late, though the line move a good deal
        faster than of late, and nobody come that overtakes it."""
        left_s = seat.traveller.time_to_begin(now)
        if left_s is None or self._is_any_hopeless:
            return
        wait_s = self._rate.least_wait_s(self._line.num_tokens_before(seat))
        if wait_s > left_s:
            retry_after_s = self.retry_after_s(seat)
            self._line.remove(seat)
            raise Overloaded(
                f"its turn would come in {wait_s:.1f} s at the earliest, and for its deadline it has to begin within "
                f"{left_s:.1f} s; {len(self._line)} requests wait already",
                retry_after_s,
            )

    def _make_room_for(self, seat: Seat[T]) -> None:
        if self._line.num_new <= self._max_queued:
            return
        last = self._line.last_of_largest()
        assert last is not None, "it is among these itself"
        retry_after_s = self.retry_after_s(last)
        self._line.remove(last)
        if last is not seat:
            message = f"{len(self._line)} requests wait, and one came that is more urgent, or whose caller has fewer"
            self._turn_away(last.traveller, Overloaded(message, retry_after_s))
            return
        if seat.reason is not None and not isinstance(seat.reason, NoRoom):
            raise seat.reason
        why = f": {seat.reason}" if seat.reason else ""
        raise Overloaded(f"{len(self._line)} requests wait already{why}", retry_after_s)

    def _advance(self, now: float) -> None:
        self._rate.advance(now, is_line=len(self._line) > 0)
