"""FairLine: waiting work of several callers, in the order in which to do it; pure, and knows no kind of work.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), each caller with the same weight: a cost that is charged to
a caller moves its next item back in virtual time. Virtual time is the start of the last item taken. A caller that
joins starts there, so idle callers save nothing up. Once the line is empty, all callers are even again.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """Items must be hashable. A caller's own come in turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[T, int]] = {}
        """By caller: its items in order of arrival, with their numbers."""
        self._begins_at: dict[str, float] = {}
        """Where each caller's next item begins, in virtual time."""
        self._now = 0.0
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, caller: str, item: T) -> None:
        if caller not in self._waiting:
            self._waiting[caller] = {}
            self._begins_at[caller] = max(self._begins_at.get(caller, 0.0), self._now)
        self._number += 1
        self._waiting[caller][item] = self._number

    def discard(self, caller: str, item: T) -> None:
        """Removes an item, unless it was taken already."""
        own = self._waiting.get(caller, {})
        own.pop(item, None)
        if not own:
            self._waiting.pop(caller, None)

    def take(self, may: Callable[[str], bool] = lambda _: True) -> T | None:
        """The next item, of the callers that may have a turn; None if there is none."""
        callers = [caller for caller in self._waiting if may(caller)]
        if not callers:
            if not self._waiting:
                self._begins_at.clear()
                self._now = 0.0
            return None
        caller = min(callers, key=lambda caller: (self._begins_at[caller], self._first(caller)[1]))
        self._now = max(self._now, self._begins_at[caller])
        item, _ = self._first(caller)
        self.discard(caller, item)
        return item

    def charge(self, caller: str, cost: float) -> None:
        """Charges what an item of this caller costs, before or after it is done."""
        self._begins_at[caller] = self._begins_at.get(caller, self._now) + cost

    def last_of_largest(self) -> tuple[str, T] | None:
        """The latest item of the caller with the most items; among equals, the latest of all."""
        if not self._waiting:
            return None
        lasts = {caller: next(reversed(own.items())) for caller, own in self._waiting.items()}
        caller = max(lasts, key=lambda caller: (len(self._waiting[caller]), lasts[caller][1]))
        return caller, lasts[caller][0]

    def _first(self, caller: str) -> tuple[T, int]:
        return next(iter(self._waiting[caller].items()))
