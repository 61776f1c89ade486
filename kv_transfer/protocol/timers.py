"""Timers: many deadlines in one heap, so that none delays another and finding the next costs nothing."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Timers(Generic[K]):
    """At most one deadline per key. One that is put off stays where it is in the heap until its old time has come."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._queued: dict[K, float] = {}
        """Where each key stands in the heap: at its deadline, or before it. Any other entry of it is stale."""
        self._heap: list[tuple[float, int, K]] = []
        self._num_pushed = 0

    def set(self, key: K, when: float) -> None:
        self._when[key] = when
        if key not in self._queued or when < self._queued[key]:
            self._push(key, when)

    def cancel(self, key: K) -> None:
        self._when.pop(key, None)

    def next(self) -> float | None:
        """When the earliest deadline falls, or None."""
        while self._heap:
            queued, _, key = self._heap[0]
            when = self._when.get(key)
            if when == queued == self._queued.get(key):
                return when
            heapq.heappop(self._heap)
            if queued == self._queued.get(key):
                del self._queued[key]
                if when is not None:  # it was put off
                    self._push(key, when)
        return None

    def pop_due(self, now: float) -> Iterator[K]:
        """Takes out every key whose deadline has come, earliest first."""
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key], self._queued[key]
            yield key

    def __len__(self) -> int:
        return len(self._when)

    def _push(self, key: K, when: float) -> None:
        self._queued[key] = when
        self._num_pushed += 1  # breaks ties, so that keys are never compared
        heapq.heappush(self._heap, (when, self._num_pushed, key))
