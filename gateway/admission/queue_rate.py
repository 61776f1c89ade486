"""QueueRate: how fast the gateway's queue moves; pure."""

import math

MEMORY_S = 30.0
"""After this time, a value counts for about a third (1/e) of a new one."""

MIN_MOVES = 4.0
"""If fewer moves than this are remembered, the queue's rate is unknown."""


class QueueRate:
    """How fast the queue moves: the tokens that left the queue for workers, divided by the time in which requests
    waited. Times must not run backwards."""

    def __init__(self) -> None:
        self._at = 0.0
        self._queue_s = 0.0
        self._moved_at = -1.0
        self._num_moves = 0.0
        """At how many moments the queue moved. Requests placed at one moment are not independent samples."""
        self._num_tokens = 0.0

    def advance(self, now: float, *, is_queue: bool) -> None:
        """Sets the time; the first call does nothing else. `is_queue`: whether requests waited until now."""
        passed_s = max(0.0, now - self._at)
        keep = math.exp(-passed_s / MEMORY_S)
        self._at = now
        self._queue_s = self._queue_s * keep + (MEMORY_S * (1.0 - keep) if is_queue else 0.0)
        self._num_moves *= keep
        self._num_tokens *= keep

    def placed(self, num_tokens: int) -> None:
        """Counts the tokens of a request that left the queue for its workers, or went to them without waiting."""
        if self._at > self._moved_at:
            self._num_moves += 1.0
            self._moved_at = self._at
        self._num_tokens += num_tokens

    def least_wait_s(self, num_tokens: int) -> float:
        """A lower bound for the time until `num_tokens` have been served; 0 if unknown.

        The bound assumes that the queue moves faster than measured, by two standard deviations of a Poisson count.
        """
        if self._num_moves < MIN_MOVES:
            return 0.0
        margin = 1.0 + 2.0 / math.sqrt(self._num_moves)
        return num_tokens * self._queue_s / (self._num_tokens * margin)

    def likely_wait_s(self, num_tokens: int) -> float:
        """The likely time until `num_tokens` have been served. If the queue did not move lately: the time for which
        requests have waited so far."""
        if self._num_moves < 1.0:
            return self._queue_s
        return num_tokens * self._queue_s / self._num_tokens
