"""ResponseStore: where responses stay after they were sent, and MemoryStore, which keeps them in this process.

Knows no HTTP and no items: a stored response is two texts.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.clock import Clock

MAX_RESPONSES = 4096
"""Of one caller. The one whose last use is longest ago makes room."""
OVERHEAD_BYTES = 1024
"""Each response counts for as much more than its texts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, as it ended."""

    response: bytes
    """JSON: what GET answers."""
    context: bytes
    """JSON: what a response that continues it needs."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.context) + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """What a store keeps at most."""

    caller_bytes: int
    """Of one caller."""
    ttl_s: float
    """Since a response was stored or last continued."""


class ResponseStore(Protocol):
    """Callers, given by name, see their own responses alone. All methods may raise StoreUnavailable."""

    async def check(self) -> None:
        """Returns if the store can be used."""

    async def keep(self, caller: str, response_id: str, stored: StoredResponse) -> None:
        """Older responses of this caller make room. One that is larger than all that a caller may have is not kept."""

    async def response(self, caller: str, response_id: str) -> bytes | None:
        """What GET answers; None if there is none."""

    async def contexts(self, caller: str, response_ids: Sequence[str]) -> list[bytes | None]:
        """One for each id; None if there is none. All of them count as used."""

    async def delete(self, caller: str, response_id: str) -> bool:
        """False if there is none."""

    async def close(self) -> None:
        """Ends connections."""


@dataclass(slots=True)
class _Held:
    """One caller's responses, in the order of their last use."""

    entries: "OrderedDict[str, _Entry]" = field(default_factory=OrderedDict)
    num_bytes: int = 0


@dataclass(slots=True)
class _Entry:
    stored: StoredResponse
    used_at: float


class MemoryStore:
    """Ends with the process, and other gateways do not see it."""

    def __init__(self, bounds: StoreBounds, total_bytes: int, clock: Clock) -> None:
        """`total_bytes`: of all callers together. The caller that has the most makes room."""
        self._bounds = bounds
        self._total_bytes = total_bytes
        self._clock = clock
        self._callers: dict[str, _Held] = {}
        self._num_bytes = 0

    async def check(self) -> None:
        return

    async def keep(self, caller: str, response_id: str, stored: StoredResponse) -> None:
        if stored.num_bytes > min(self._bounds.caller_bytes, self._total_bytes):
            logger.warning("response %s is not kept: it has %d bytes", response_id, stored.num_bytes)
            return
        self._drop_old()
        self._drop(caller, response_id)
        held = self._callers.setdefault(caller, _Held())
        held.entries[response_id] = _Entry(stored, self._clock.now())
        held.num_bytes += stored.num_bytes
        self._num_bytes += stored.num_bytes
        while held.num_bytes > self._bounds.caller_bytes or len(held.entries) > MAX_RESPONSES:
            self._drop(caller, next(iter(held.entries)))
        while self._num_bytes > self._total_bytes:
            most = max(self._callers, key=lambda name: self._callers[name].num_bytes)
            self._drop(most, next(iter(self._callers[most].entries)))

    async def response(self, caller: str, response_id: str) -> bytes | None:
        entry = self._entry(caller, response_id)
        return None if entry is None else entry.stored.response

    async def contexts(self, caller: str, response_ids: Sequence[str]) -> list[bytes | None]:
        found = [self._entry(caller, response_id) for response_id in response_ids]
        for response_id, entry in zip(response_ids, found, strict=True):
            if entry is not None:
                entry.used_at = self._clock.now()
                self._callers[caller].entries.move_to_end(response_id)
        return [None if entry is None else entry.stored.context for entry in found]

    async def delete(self, caller: str, response_id: str) -> bool:
        return self._entry(caller, response_id) is not None and self._drop(caller, response_id)

    async def close(self) -> None:
        self._callers.clear()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all callers."""
        return self._num_bytes

    def _entry(self, caller: str, response_id: str) -> _Entry | None:
        self._drop_old()
        held = self._callers.get(caller)
        return None if held is None else held.entries.get(response_id)

    def _drop(self, caller: str, response_id: str) -> bool:
        held = self._callers.get(caller)
        entry = None if held is None else held.entries.pop(response_id, None)
        if held is None or entry is None:
            return False
        held.num_bytes -= entry.stored.num_bytes
        self._num_bytes -= entry.stored.num_bytes
        if not held.entries:
            del self._callers[caller]
        return True

    def _drop_old(self) -> None:
        """Each caller's first one is its oldest."""
        before = self._clock.now() - self._bounds.ttl_s
        for caller, held in list(self._callers.items()):
            while held.entries and next(iter(held.entries.values())).used_at <= before:
                self._drop(caller, next(iter(held.entries)))
