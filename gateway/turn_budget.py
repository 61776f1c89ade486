"""TurnBudget and SharedTurns: how long one turn of the event loop works on something that takes many."""

import asyncio
from collections.abc import Callable

TURN_S = 0.002
"""A worker's heartbeat, a stream's token or a probe waits for as long as that and one more portion."""


class TurnBudget:
    """The budget of one task. Other tasks run each time that it is spent."""

    def __init__(self, now: Callable[[], float], turn_s: float = TURN_S) -> None:
        self._now = now
        self._turn_s = turn_s
        self._began_at = now()

    async def pause_if_spent(self) -> None:
        """To be called after every portion of work."""
        if self._now() - self._began_at >= self._turn_s:
            await asyncio.sleep(0)
            self._began_at = self._now()


class SharedTurns:
    """One budget for several tasks, which take turns in the order of their arrival. Together they work for at most
    `turn_s` and one more portion in a turn of the loop. A single task with little work never waits.

        async with turns:
            portion of work
    """

    def __init__(self, now: Callable[[], float], turn_s: float = TURN_S) -> None:
        self._now = now
        self._turn_s = turn_s
        self._lock = asyncio.Lock()
        """First come, first served."""
        self._began_at = 0.0
        self._spent_s = 0.0

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._began_at = self._now()

    async def __aexit__(self, *_: object) -> None:
        try:
            self._spent_s += self._now() - self._began_at
            if self._spent_s >= self._turn_s:
                self._spent_s = 0.0
                await asyncio.sleep(0)
        finally:
            self._lock.release()
