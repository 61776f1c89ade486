"""RemotePools: the peers' pools that this rank reads, open while hand-overs come from them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from baton.clock import Clock
from kv_transfer.process_exits import ProcessExits
from kv_transfer.transport.base import (
    MAX_DESCRIPTION_BYTES,
    PoolReader,
    ReadDone,
    RemotePool,
    Runs,
    TransportError,
)

logger = logging.getLogger(__name__)

IDLE_S = 30.0
"""A pool without hand-overs is closed after this long; its process may have ended unnoticed."""

PoolKey = tuple[str, int, str]
"""The producer's incarnation, its rank, and the transport."""


@dataclass(slots=True)
class _OpenPool:
    pool: RemotePool
    used_at: float
    watch: int | None
    """Of the process that owns the pool."""
    has_failed: bool = False
    """A read of it failed, or its process has ended: the next hand-over opens it again first."""


class RemotePools:
    """Owns the readers: `close` ends them.

    An open pool keeps its memory allocated even after its process has ended. So pools of ended processes are closed at
    once: until then, the process that replaces such a one has little room.
    """

    def __init__(self, readers: Mapping[str, PoolReader], clock: Clock) -> None:
        self._readers = readers
        self._clock = clock
        self._exits = ProcessExits()
        self._open: dict[PoolKey, _OpenPool] = {}
        self._orphaned: set[PoolKey] = set()
        """Open pools of processes that have ended."""

    def fileno(self) -> int:
        """A file descriptor that is readable while `close_orphaned` has something to do."""
        return self._exits.fileno()

    def open(self, key: PoolKey, description: bytes) -> None:
        """Opens the pool, unless it is open and no read of it has failed.

        TransportError if the pool is unreachable.
        """
        if key in self._open and not self._open[key].has_failed:
            return
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise TransportError(
                f"the pool description has {len(description)} bytes; at most "
                f"{MAX_DESCRIPTION_BYTES} are allowed"
            )
        self.close_one(key)
        pool = self._readers[key[2]].open(description)
        self._open[key] = _OpenPool(pool, self._clock.now(), self._watch(pool))

    def read(self, key: PoolKey, runs: Runs) -> int:
        """Begins a read; see RemotePool. TransportError if the pool is not open."""
        pool = self._open.get(key)
        if pool is None:
            raise TransportError("the peer's pool is not open")
        pool.used_at = self._clock.now()
        return pool.pool.read(runs)

    def mark_failed(self, key: PoolKey) -> None:
        """A read of this pool failed. The next `open` replaces the pool."""
        if key in self._open:
            self._open[key].has_failed = True

    def poll(self) -> Iterator[tuple[str, ReadDone]]:
        """Finished reads, with their transport."""
        for transport, reader in self._readers.items():
            try:
                ended = reader.poll()
            except TransportError as error:
                logger.warning("%s: %s", transport, error)
                continue
            for done in ended:
                yield transport, done

    def poll_interval_s(self, transport: str) -> float | None:
        return self._readers[transport].poll_interval_s

    def close_orphaned(self, is_read: Callable[[PoolKey], bool]) -> None:
        """Closes the pools of processes that have ended, except those that `is_read`, which a later call closes."""
        if ended := set(self._exits.take()):
            orphaned = {key for key, pool in self._open.items() if pool.watch in ended}
            for key in orphaned:
                self._open[key].has_failed = True
            self._orphaned |= orphaned
        for key in sorted(self._orphaned):
            if not is_read(key):
                logger.info("rank %d of %s has ended: closed its pool (%s)", key[1], key[0], key[2])
                self._close(key)

    def close_unused(self, is_needed: Callable[[str], bool]) -> None:
        """Closes pools that no hand-over has used for a while; `is_needed` says whether a producer may still send."""
        now = self._clock.now()
        for key, pool in list(self._open.items()):
            if is_needed(key[0]):
                pool.used_at = now
            elif now >= pool.used_at + IDLE_S:  # summed as in `next_deadline`, or the two may disagree
                self._close(key)

    def close_one(self, key: PoolKey) -> None:
        """The pool's reads have ended when this returns."""
        if key in self._open:
            self._close(key)

    def close(self) -> None:
        """Closes every pool first, since that needs its reader, and then the readers."""
        for key in list(self._open):
            self._close(key)
        for transport, reader in self._readers.items():
            try:
                reader.close()
            except TransportError as error:
                logger.warning("closing %s: %s", transport, error)
        self._exits.close()

    def next_deadline(self) -> float | None:
        """When to call `close_unused` at the latest."""
        return min((pool.used_at + IDLE_S for pool in self._open.values()), default=None)

    def _watch(self, pool: RemotePool) -> int | None:
        if pool.owner_pid is None:
            return None
        try:
            return self._exits.watch(pool.owner_pid)
        except ProcessLookupError as error:
            pool.close()
            raise TransportError(f"process {pool.owner_pid} has ended") from error

    def _close(self, key: PoolKey) -> None:
        pool = self._open.pop(key)
        self._orphaned.discard(key)
        if pool.watch is not None:
            self._exits.drop(pool.watch)
        try:
            pool.pool.close()
        except TransportError as error:
            logger.warning("error while closing a pool: %s", error)
