"""LineRate: how fast the line moved lately, and so how long a place in it takes; pure, in bounded memory."""

import math

MEMORY_S = 30.0
"""What was so long ago counts for a third (1/e) of what is new."""

MIN_MOVES = 4.0
"""After fewer than so many, as counted by that memory, nobody knows how fast it moves."""


class LineRate:
    """Tokens that went from the line to workers, over the time that there was a line. Times must not run backwards."""

    def __init__(self) -> None:
        self._at = 0.0
        self._line_s = 0.0
        self._moved_at = -1.0
        self._num_moves = 0.0
        """Moments in which it moved: those that are placed in the same one were not so by chance."""
        self._num_tokens = 0.0

    def advance(self, now: float, *, is_line: bool) -> None:
        """Until now, somebody waited, or nobody did; the first call only sets the time."""
        passed_s = max(0.0, now - self._at)
        keep = math.exp(-passed_s / MEMORY_S)
        self._at = now
        self._line_s = self._line_s * keep + (MEMORY_S * (1.0 - keep) if is_line else 0.0)
        self._num_moves *= keep
        self._num_tokens *= keep

    def placed(self, num_tokens: int) -> None:
        """Somebody left the line for its workers, or came past it."""
        if self._at > self._moved_at:
            self._num_moves += 1.0
            self._moved_at = self._at
        self._num_tokens += num_tokens

    def least_wait_s(self, num_tokens: int) -> float:
        """How long it takes at least until so much has been served; 0 if nobody knows.

        Errs towards too little: as if the line moved faster than it seemed by two standard deviations of a Poisson
        count.
        """
        if self._num_moves < MIN_MOVES or self._line_s <= 0.0:
            return 0.0
        margin = 1.0 + 2.0 / math.sqrt(self._num_moves)
        return num_tokens * self._line_s / (self._num_tokens * margin)

    def likely_wait_s(self, num_tokens: int) -> float:
        """How long it likely takes; while the line stands still, as long as it has stood."""
        if self._num_moves < 1.0:
            return self._line_s
        return num_tokens * self._line_s / self._num_tokens
