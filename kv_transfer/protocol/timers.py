"""Timers: many deadlines in one heap, so that none delays another and finding the next costs nothing."""

import heapq
from typing import Generic, TypeVar

from baton.system.standstill import Standstill

K = TypeVar("K")


class Timers(Generic[K]):
    """At most one deadline per key. A postponed deadline keeps its heap entry until the old time, and only then gets a
    new one.

    With a `standstill`, time during which this process stood still does not count: it postpones all
    deadlines. Callers that set a deadline must have called `look` or `running` of the standstill with the
    current time.
    """

    def __init__(self, standstill: Standstill | None = None) -> None:
        self._standstill = standstill
        self._when: dict[K, float] = {}
        self._queued: dict[K, float] = {}
        """By key: the time of its entry in the heap, at or before its deadline. Other entries of that key are stale."""
        self._heap: list[tuple[float, int, K]] = []
        """Entries by time. These times, like all others here, exclude standstills."""
        self._num_pushed = 0

    def set(self, key: K, when: float) -> None:
        when -= self._standstill_s
        self._when[key] = when
        if key not in self._queued or when < self._queued[key]:
            self._push(key, when)

    def cancel(self, key: K) -> None:
        self._when.pop(key, None)

    def next(self) -> float | None:
        """The latest time for the next call of `pop_due`, or None."""
        when = self._earliest()
        if when is None or self._standstill is None:
            return when
        return min(when, self._standstill.next_look)

    def pop_due(self, now: float) -> list[K]:
        """Removes and returns every key whose deadline has come, earliest first."""
        if self._standstill is not None:
            self._standstill.look(now)
        due: list[K] = []
        while (when := self._earliest()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key], self._queued[key]
            due.append(key)
        return due

    @property
    def _standstill_s(self) -> float:
        return 0.0 if self._standstill is None else self._standstill.total_s

    def _earliest(self) -> float | None:
        while self._heap:
            queued, _, key = self._heap[0]
            when = self._when.get(key)
            if when == queued == self._queued.get(key):
                return when + self._standstill_s
            heapq.heappop(self._heap)
            if queued == self._queued.get(key):
                del self._queued[key]
                if when is not None:  # postponed
                    self._push(key, when)
        return None

    def _push(self, key: K, when: float) -> None:
        self._queued[key] = when
        self._num_pushed += 1  # breaks ties, so that keys are never compared
        heapq.heappush(self._heap, (when, self._num_pushed, key))
