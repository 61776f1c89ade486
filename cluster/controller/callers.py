"""Callers: notes when gateways and the owner call, to tell a fleet in use from an orphan; carries out no call."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.clock import Clock
from baton.system.standstill import Standstill, pace_of


class Callers:
    """When a caller last called. Standstills of this process do not count as time without a call."""

    def __init__(self, clock: Clock, orphan_timeout_s: float) -> None:
        self._clock = clock
        self._orphan_timeout_s = orphan_timeout_s
        self._pace_s = pace_of(orphan_timeout_s)
        self._standstill = Standstill(self._pace_s)
        self._num_waiting = 0
        self._last_call = self._running_s()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A call that waits for its answer during the `with`. A fleet with a waiting call is no orphan."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._last_call = self._running_s()

    async def orphaned(self) -> None:
        """Returns once no call has come for `orphan_timeout_s`."""
        check_every_s = self._pace_s / 2
        while True:
            left_s = self._last_call + self._orphan_timeout_s - self._running_s()
            if self._num_waiting == 0 and left_s <= 0:
                return
            await asyncio.sleep(check_every_s if self._num_waiting else min(left_s, check_every_s))

    def _running_s(self) -> float:
        return self._standstill.running(self._clock.now())
