"""LoopLag: how late an event loop runs its timers, which is how long everything on it may have to wait."""

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.25


class LoopLag:
    """Measures from `start` to `stop`, both called on the loop."""

    def __init__(self, on_measured: Callable[[float], None]) -> None:
        """`on_measured` receives the loop's lag in seconds, four times a second."""
        self._on_measured = on_measured
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._schedule(loop, loop.time() + INTERVAL_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = loop.call_at(due, self._measure, loop, due)

    def _measure(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self._on_measured(max(0.0, now - due))
        self._schedule(loop, now + INTERVAL_S)
