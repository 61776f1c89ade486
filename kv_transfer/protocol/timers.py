"""Timers: many deadlines in one heap, so that none delays another and finding the next costs nothing."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Timers(Generic[K]):
    """At most one deadline per key. Moving one leaves a stale heap entry behind, which is dropped when it surfaces."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._num_pushed = 0

    def set(self, key: K, when: float) -> None:
        self._when[key] = when
        self._num_pushed += 1  # breaks ties, so that keys are never compared
        heapq.heappush(self._heap, (when, self._num_pushed, key))

    def cancel(self, key: K) -> None:
        self._when.pop(key, None)

    def next(self) -> float | None:
        """When the earliest deadline falls, or None."""
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[K]:
        """Takes out every key whose deadline has come, earliest first."""
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key]
            yield key

    def __len__(self) -> int:
        return len(self._when)
