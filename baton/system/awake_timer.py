"""Timeouts of an event loop that do not count time during which the loop itself stood still."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.system.standstill import Standstill, pace_of

_LOOKS_PER_PACE = 2


class AwakeTimer:
    """Calls back once, after the event loop has run for this many seconds, unless cancelled before."""

    def __init__(self, seconds: float, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._look_every_s = pace_of(seconds) / _LOOKS_PER_PACE
        self._standstill = Standstill(pace_of(seconds))
        self._ends_at = self._standstill.running(self._loop.time()) + seconds
        self._handle: asyncio.TimerHandle | None = None
        self._set()

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._ends_at - self._standstill.running(self._loop.time()))

    def cancel(self) -> None:
        """Prevents the call. May be repeated."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set(self) -> None:
        self._handle = self._loop.call_later(min(self.remaining_s, self._look_every_s), self._look)

    def _look(self) -> None:
        if self.remaining_s > 0.0:
            self._set()
            return
        self._handle = None
        self._on_end()


@asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[AwakeTimer]:
    """Like asyncio.timeout, without the loop's standstills: raises TimeoutError if the `async with` takes longer.

    After a standstill of the loop, there is still some time to read the input that arrived meanwhile.
    """
    async with asyncio.timeout(None) as scope:
        timer = AwakeTimer(seconds, lambda: scope.reschedule(asyncio.get_running_loop().time()))
        try:
            yield timer
        finally:
            timer.cancel()
