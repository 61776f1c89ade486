"""TurnBudget and SharedTurns: limit how long one turn of the event loop works on a long task."""

import asyncio
from collections.abc import Callable

TURN_S = 0.002
"""How long a task may work in one turn. So a heartbeat, a stream's token or a probe waits at most for this time and one
more portion of work."""


class TurnBudget:
    """The budget of one task of the running event loop. Each time that the budget is spent, other tasks run."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._began_at = self._now()

    async def pause_if_spent(self) -> None:
        """Lets other tasks run if the budget is spent. Call this after every portion of work."""
        if self._now() - self._began_at >= TURN_S:
            await asyncio.sleep(0)
            self._began_at = self._now()


class SharedTurns:
    """One budget for several tasks, which take turns in the order of their arrival. In one turn of the event
    loop, they work together for at most TURN_S and one more portion. A single task with little work hardly
    ever waits.

        async with turns:
            portion of work
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
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
            if self._spent_s >= TURN_S:
                self._spent_s = 0.0
                await asyncio.sleep(0)
        finally:
            self._lock.release()
