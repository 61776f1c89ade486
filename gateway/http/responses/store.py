"""ResponseStore: stores responses that have ended. RunningResponses: running responses that will be stored.

MemoryStore is a ResponseStore in this process' memory. A store does not interpret the two JSON texts of a
StoredResponse.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.clock import Clock

MAX_RESPONSES = 4096
"""At most this many responses of one caller are stored. A further one replaces the least recently used one."""
OVERHEAD_BYTES = 1024
"""Added to the size of each response's texts when bytes are counted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response in its final state."""

    response: bytes
    """JSON: what GET answers."""
    context: bytes
    """JSON: what a later response needs to continue this one."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.context) + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """The limits of a store."""

    caller_bytes: int
    """All responses of one caller have at most this many bytes together."""
    ttl_s: float
    """How long a response is stored after it arrived, or was last used by another request."""


class ResponseStore(Protocol):
    """Stores responses by caller's name; a caller sees only its own. All methods may raise
    StoreUnavailable."""

    async def check(self) -> None:
        """Returns if the store can be used; otherwise raises StoreUnavailable."""

    async def keep(self, caller: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response. If the caller has too many bytes, its older responses are removed. A response that alone
        exceeds the caller's limit is not stored."""

    async def response(self, caller: str, response_id: str) -> bytes | None:
        """The JSON that GET answers; None if the caller has no such response."""

    async def contexts(self, caller: str, response_ids: Sequence[str]) -> list[bytes | None]:
        """The context of each response; None if the caller has no such response. All these responses count as
        used."""

    async def delete(self, caller: str, response_id: str) -> bool:
        """Removes a response. Returns False if the caller has no such response."""

    async def close(self) -> None:
        """Closes the store and its connections."""


@dataclass(slots=True)
class _Held:
    """One caller's responses, the least recently used one first."""

    entries: "OrderedDict[str, _Entry]" = field(default_factory=OrderedDict)
    num_bytes: int = 0


@dataclass(slots=True)
class _Entry:
    stored: StoredResponse
    used_at: float


class MemoryStore:
    """Stores responses in memory: they are lost when the process ends, and other gateways do not see them."""

    def __init__(self, bounds: StoreBounds, total_bytes: int, clock: Clock) -> None:
        """`total_bytes`: all callers' responses have at most this many bytes together. If there are more, responses
        of the caller with the most bytes are removed."""
        self._bounds = bounds
        self._total_bytes = total_bytes
        self._clock = clock
        self._callers: dict[str, _Held] = {}
        self.num_bytes = 0
        """The number of bytes of all callers' responses."""

    async def check(self) -> None:
        return

    async def keep(self, caller: str, response_id: str, stored: StoredResponse) -> None:
        if stored.num_bytes > min(self._bounds.caller_bytes, self._total_bytes):
            logger.warning(
                "response %s is not stored: its %d bytes exceed gateway.response_store_caller_mib, or "
                "gateway.response_store_mib",
                response_id,
                stored.num_bytes,
            )
            return
        self._drop_old()
        self._drop(caller, response_id)
        held = self._callers.setdefault(caller, _Held())
        held.entries[response_id] = _Entry(stored, self._clock.now())
        held.num_bytes += stored.num_bytes
        self.num_bytes += stored.num_bytes
        while held.num_bytes > self._bounds.caller_bytes or len(held.entries) > MAX_RESPONSES:
            self._drop(caller, next(iter(held.entries)))
        while self.num_bytes > self._total_bytes:
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
        self.num_bytes = 0

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
        self.num_bytes -= entry.stored.num_bytes
        if not held.entries:
            del self._callers[caller]
        return True

    def _drop_old(self) -> None:
        """Removes expired responses. The first response of each caller is its least recently used one."""
        before = self._clock.now() - self._bounds.ttl_s
        for caller, held in list(self._callers.items()):
            while held.entries and next(iter(held.entries.values())).used_at <= before:
                self._drop(caller, next(iter(held.entries)))


class RunningResponse:
    """One response from its beginning until it was sent."""

    def __init__(self, all_running: "RunningResponses", caller: str, response_id: str) -> None:
        self._all = all_running
        self._key = (caller, response_id)
        self._kept: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def keep(self, stored: StoredResponse) -> None:
        """Stores the response in its final state. Raises StoreUnavailable if the store fails."""
        await self._all.store.keep(*self._key, stored)
        if not self._kept.done():
            self._kept.set_result(stored.response)

    def end(self) -> None:
        """Call this when the response no longer runs, whether it was stored or not."""
        self._all.remove(self._key)
        if not self._kept.done():
            self._kept.set_result(None)

    async def wait_for_end(self) -> bytes | None:
        """Waits for the response's end. Returns the stored response; None if it was not stored."""
        return await asyncio.shield(self._kept)


class RunningResponses:
    """All running responses of one gateway that will be stored. Callers can cancel them."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[tuple[str, str], RunningResponse] = {}

    def begin(self, caller: str, response_id: str) -> RunningResponse:
        """Adds a response. Its `end` must be called, even after an error."""
        running = self._running[caller, response_id] = RunningResponse(self, caller, response_id)
        return running

    def find(self, caller: str, response_id: str) -> RunningResponse | None:
        """The running response. None if it does not run on this gateway, or belongs to another caller."""
        return self._running.get((caller, response_id))

    def remove(self, key: tuple[str, str]) -> None:
        self._running.pop(key, None)
