"""WaitingRoom: requests that no worker has room for at present, in order; pure, so that a simulation runs it too.

Order: priority (lower first), then those that ran already before new ones, then arrival.

Whenever something may have made room, `sweep` asks for the first ones in line. A request that does not fit yet lets
others pass that do, so that a long prompt does not hold up short ones while its room gathers; but it looks no further
than LOOK_AHEAD that do not fit, which bounds what a sweep costs however many wait, and one that MAX_PASSED others have
passed lets nobody pass any more: then all room that is made gathers for it. A request for which there is no worker at
all holds nobody up, since room that others leave would be of no use to it.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Generic, Protocol, TypeVar

from baton.errors import Overloaded, RequestError
from gateway.routing.placement import NoRoom

LOOK_AHEAD = 8
MAX_PASSED = 64

RETRY_AFTER_S = 1.0
"""What a client is told that finds no room."""


class Traveller(Protocol):
    """What waits."""

    @property
    def priority(self) -> int: ...

    @property
    def is_resumed(self) -> bool:
        """It ran already."""
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
    reason: RequestError | None = None
    """Why it has not been placed, as of the last time that somebody tried."""
    num_passed: int = 0
    """How many were placed that came after it."""
    key: tuple[int, bool, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.traveller.priority, not self.traveller.is_resumed, self.number


class WaitingRoom(Generic[T]):
    """`place` takes a traveller to its workers, or says why that cannot be: NoRoom, or no worker."""

    def __init__(self, max_queued: int, place: Callable[[T], RequestError | None]) -> None:
        self._max_queued = max_queued
        self._place = place
        self._line: list[Seat[T]] = []
        self._num_joined = 0

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

        Overloaded if there is none left, or what keeps it from being placed if that is no want of room. One that ran
        already always finds a seat: there are no more of these than were placed once.
        """
        self._num_joined += 1
        seat = Seat(traveller, self._num_joined, now)
        insort(self._line, seat, key=_key)
        if self._is_in_sight(seat):  # else nothing has changed for those that come before it
            self.sweep()
        if seat not in self._line:
            return None
        if len(self._line) > self._max_queued and not traveller.is_resumed:
            self._line.remove(seat)
            if seat.reason is not None and not isinstance(seat.reason, NoRoom):
                raise seat.reason
            why = f": {seat.reason}" if seat.reason else ""
            raise Overloaded(f"{len(self._line)} requests wait already{why}", RETRY_AFTER_S)
        return seat

    def leave(self, seat: Seat[T]) -> None:
        """It does not wait any more; no error if it was placed."""
        if seat in self._line:
            self._line.remove(seat)

    def sweep(self) -> None:
        """Something may have made room: places whoever can be, in order."""
        held_up: list[Seat[T]] = []
        hopeless: dict[object, RequestError] = {}
        """Needs that no worker meets at present, and why not."""
        for seat in tuple(self._line):
            needs = seat.traveller.needs()
            if (reason := hopeless.get(needs)) is not None:
                seat.reason = reason
                continue
            seat.reason = self._place(seat.traveller)
            if seat.reason is None:
                self._line.remove(seat)
                for passed in held_up:
                    passed.num_passed += 1
            elif not isinstance(seat.reason, NoRoom):
                hopeless[needs] = seat.reason
            else:
                held_up.append(seat)
                if len(held_up) == LOOK_AHEAD or seat.num_passed >= MAX_PASSED:
                    return

    def _is_in_sight(self, seat: Seat[T]) -> bool:
        """Whether a sweep may come as far, with as many before it as there is no room for."""
        before = takewhile(lambda other: other is not seat, self._line)
        held_up = (other for other in before if other.reason is None or isinstance(other.reason, NoRoom))
        return len(list(islice(held_up, LOOK_AHEAD))) < LOOK_AHEAD


def _key(seat: Seat[T]) -> tuple[int, bool, int]:
    return seat.key
