"""LoopLag: measures how late an event loop runs its timers. Every task of the loop may have to wait this long."""

import asyncio
from collections.abc import Callable

CHECK_INTERVAL_S = 0.02
"""The time between two checks of the loop. The measured length of a stall is too short by at most this time."""
REPORT_INTERVAL_S = 0.25
LONGEST_S = 60.0


class LoopLag:
    """Measures from `start` to `stop`. Call both on the event loop."""

    def __init__(self, on_measured: Callable[[float, float], None]) -> None:
        """Calls `on_measured` four times a second, with two values in seconds: the longest lag since the
        previous call, and the longest lag of the last one to two minutes."""
        self._on_measured = on_measured
        self._timer: asyncio.TimerHandle | None = None
        self._worst_s = 0.0
        self._report_at = 0.0
        self._longest_s = self._longest_before_s = 0.0
        """The longest lag of this minute, and of the minute before."""
        self._minute_ends_at = 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._report_at = loop.time() + REPORT_INTERVAL_S
        self._minute_ends_at = loop.time() + LONGEST_S
        self._schedule(loop, loop.time() + CHECK_INTERVAL_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = loop.call_at(due, self._check, loop, due)

    def _check(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._worst_s = max(self._worst_s, now - due)
        if now >= self._report_at:
            self._report(now)
        self._schedule(loop, now + CHECK_INTERVAL_S)

    def _report(self, now: float) -> None:
        if now >= self._minute_ends_at:
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
            self._minute_ends_at = now + LONGEST_S
        self._longest_s = max(self._longest_s, self._worst_s)
        self._on_measured(self._worst_s, max(self._longest_s, self._longest_before_s))
        self._worst_s = 0.0
        self._report_at = now + REPORT_INTERVAL_S
