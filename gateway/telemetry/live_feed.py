"""LiveFeed: while there are viewers, makes one snapshot of the cluster per second, which all viewers share."""

import asyncio
from collections.abc import AsyncGenerator

from pydantic import TypeAdapter

from baton.clock import Clock
from gateway.places import Places
from gateway.telemetry.cluster_view import ClusterView
from gateway.telemetry.snapshot import ClusterSnapshot

INTERVAL_S = 1.0
MAX_VIEWERS = 64
"""Limit of viewers, since each viewer needs a connection. Further viewers are refused."""

_JSON = TypeAdapter(ClusterSnapshot)


class Edition:
    """A snapshot and its JSON, which is made once for administrators and once for other callers."""

    def __init__(self, snapshot: ClusterSnapshot, made_at: float) -> None:
        self.made_at = made_at
        self._snapshot = snapshot
        self._json: dict[bool, bytes] = {}

    def json(self, *, for_administrators: bool) -> bytes:
        if for_administrators not in self._json:
            shown = self._snapshot if for_administrators else self._snapshot.for_everybody()
            self._json[for_administrators] = _JSON.dump_json(shown)
        return self._json[for_administrators]


class LiveFeed:
    """Use it from one event loop only. `stop` ends every `watch`."""

    def __init__(self, view: ClusterView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._latest: Edition | None = None
        """The latest edition; None before the first viewer."""
        self._viewers = Places(MAX_VIEWERS, "viewers are watching already")
        self._is_over = asyncio.Event()

    async def latest(self) -> Edition:
        """The latest edition, at most INTERVAL_S old."""
        await self._view.ask_controller()
        if self._latest is None or self._age_s(self._latest) >= INTERVAL_S:
            return self._publish()
        return self._latest

    async def watch(self) -> AsyncGenerator[Edition, None]:
        """Yields the latest edition at once, then one edition every INTERVAL_S.

        In each interval, the first viewer that continues makes the edition. A slow viewer misses editions; they are
        not kept for it. Raises Overloaded at the beginning if there are already MAX_VIEWERS viewers.
        """
        with self._viewers.hold():
            edition = await self.latest()
            while True:
                yield edition
                if await self._ends_within(INTERVAL_S - self._age_s(edition)):
                    return
                newer = self._latest
                edition = self._publish() if newer is None or newer is edition else newer

    async def stop(self) -> None:
        """Ends all viewers' streams. May be called more than once."""
        self._is_over.set()
        await self._view.stop()

    async def _ends_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, delay_s)):
                return await self._is_over.wait()
        except TimeoutError:
            return False

    def _age_s(self, edition: Edition) -> float:
        return self._clock.now() - edition.made_at

    def _publish(self) -> Edition:
        self._latest = Edition(self._view.snapshot(), self._clock.now())
        return self._latest
