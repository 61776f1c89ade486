"""RunningClock: measures how long work takes, without the time in which this process stood still."""

from baton.clock import Clock


class RunningClock:
    """A clock that stops while the process does not run, for example after SIGSTOP.

    One thread calls `look` more often than every `pace_s`. If it could not, the process stood still, and of this time
    only `pace_s` counts. All threads may call `now`; it leaves out a standstill even before the next `look`.
    """

    def __init__(self, clock: Clock, pace_s: float) -> None:
        self._clock = clock
        self._pace_s = pace_s
        self._looked = (clock.now(), 0.0)
        """When `look` was last called, and the total standstill until then; replaced whole."""

    def look(self) -> None:
        self._looked = self._measure()

    def now(self) -> float:
        now, stood_s = self._measure()
        return now - stood_s

    def _measure(self) -> tuple[float, float]:
        """The time now, and the total standstill until now."""
        looked_at, stood_s = self._looked  # before `now`: the process may stand still in between
        now = self._clock.now()
        return now, stood_s + max(0.0, now - looked_at - self._pace_s)
