"""Standstill: time in which this process itself did not run, which must not count as silence of its peers; pure."""

from collections.abc import Callable

_PACES_PER_LIMIT = 4
"""A limit has at least this many paces, so even a long standstill uses up only a quarter of it."""
_LONGEST_PACE_S = 2.0


def pace_of(limit_s: float, at_least_s: float = 1e-3) -> float:
    """The longest interval between an observer's looks at which this limit can be measured."""
    return max(at_least_s, min(limit_s / _PACES_PER_LIMIT, _LONGEST_PACE_S))


def wait_awake(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Waits in short pieces; a standstill uses up at most one of them. Returns whether `wait` succeeded in time."""
    num_pieces = max(_PACES_PER_LIMIT, int(timeout_s / _LONGEST_PACE_S))
    return any(wait(timeout_s / num_pieces) for _ in range(num_pieces))


class Standstill:
    """Infers from the intervals between looks how long the process stood still. Times are the caller's, in seconds.

    An observer that waits for other processes looks at least every `pace_s` while it waits. A longer interval
    means that the process was stopped, swapped out or blocked, and could receive nothing. Of this interval only
    one `pace_s` counts.

    `pace_s` should be a fraction of the measured limit, and longer than one turn of a busy observer; then real
    silence is noticed as early as without this class. After a gap, an observer first reads what has arrived and then
    judges. The gap used up only one `pace_s` of the limit, so messages that are still on their way may arrive in the
    rest.
    """

    def __init__(self, pace_s: float) -> None:
        assert pace_s > 0.0, f"looks cannot be {pace_s} s apart"
        self.total_s = 0.0
        """Total standstill seen so far."""
        self._pace_s = pace_s
        self._looked_at: float | None = None

    def look(self, now: float) -> float:
        """How long the process stood still since the last look; mostly 0.0.

        Call this before the first measured wait, too, and after each pause between waits.
        """
        looked_at, self._looked_at = self._looked_at, now
        if looked_at is None:
            return 0.0
        stood_s = max(0.0, now - looked_at - self._pace_s)
        self.total_s += stood_s
        return stood_s

    def running(self, now: float) -> float:
        """Time without standstills, in which the silence of peers is measured. Also calls `look`."""
        self.look(now)
        return now - self.total_s

    @property
    def next_look(self) -> float:
        """The latest time for the next look while a wait is going on."""
        assert self._looked_at is not None, "nothing is waited for yet"
        return self._looked_at + self._pace_s
