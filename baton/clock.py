"""Time as an argument: only the code that puts a process together reads the system clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds since an arbitrary origin; readings of two processes cannot be compared."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only on request; drives unit tests and the simulator."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward; time never runs backwards."""
        assert seconds >= 0.0, f"cannot advance a clock by {seconds} s"
        self._now += seconds
