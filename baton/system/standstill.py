"""Standstill: time in which this process itself did not run, and which is not the silence of others; pure."""

from collections.abc import Callable

_PACES_PER_LIMIT = 4
"""So a standstill, however long, uses up a quarter of a limit."""
_LONGEST_PACE_S = 2.0


def pace_of(limit_s: float, at_least_s: float = 1e-3) -> float:
    """How far apart an observer's looks may be that measures up to this limit."""
    return max(at_least_s, min(limit_s / _PACES_PER_LIMIT, _LONGEST_PACE_S))


def wait_awake(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Waits on a thread, in pieces, of which a standstill uses up one; whether `wait` said in time that it is over."""
    num_pieces = max(_PACES_PER_LIMIT, int(timeout_s / _LONGEST_PACE_S))
    return any(wait(timeout_s / num_pieces) for _ in range(num_pieces))


class Standstill:
    """Tells from the pace of its looks for how long the process stood still. Times are the caller's, in seconds.

    An observer that waits for others looks at least every `pace_s` while it waits. Where two looks are further apart,
    the process was stopped, swapped out or blocked, and could hear nobody. Of such a gap only one `pace_s` counts.

    So `pace_s` is to be a fraction of the limit that is measured, and longer than a turn of a busy observer: up to that
    a real silence is noticed as soon as without all this. After a gap an observer reads what has come in before it
    judges; what is left of the limit then is the time for what is still on its way.
    """

    def __init__(self, pace_s: float) -> None:
        assert pace_s > 0.0, f"looks cannot be {pace_s} s apart"
        self.total_s = 0.0
        """For how long the process stood still in all, as far as it has looked."""
        self._pace_s = pace_s
        self._looked_at: float | None = None

    def look(self, now: float) -> float:
        """For how long the process stood still since the last look; mostly 0.0.

        Before the first wait that is measured, and after a pause between waits, there is to be a look, too.
        """
        looked_at, self._looked_at = self._looked_at, now
        if looked_at is None:
            return 0.0
        stood_s = max(0.0, now - looked_at - self._pace_s)
        self.total_s += stood_s
        return stood_s

    def running(self, now: float) -> float:
        """The time without standstills: what the silence of others is measured in. This is a look."""
        self.look(now)
        return now - self.total_s

    @property
    def next_look(self) -> float:
        """When to look at the latest while something is waited for."""
        assert self._looked_at is not None, "nothing is waited for yet"
        return self._looked_at + self._pace_s
