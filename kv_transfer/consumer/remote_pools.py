"""RemotePools: the peers' pools that this rank has open for hand-overs, and its current reads of them."""

import logging
import os
import select
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from baton.clock import Clock
from baton.system.standstill import Standstill
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.protocol.timers import Timers
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
"""A pool is closed when no hand-over has used it for this long, since its process may have ended unnoticed."""

READ_TIMEOUT_S = 10.0
"""A read that takes longer counts as stuck. Its pool is closed, which ends the read."""

PoolKey = tuple[str, int, str]
"""The producer's incarnation, its rank, and the transport."""

_ReadKey = tuple[str, int]
"""The transport, and the read's number there."""


@dataclass(slots=True)
class _OpenPool:
    pool: RemotePool
    used_at: float
    watch: int | None
    """Watch of the process that owns the pool; None if its end cannot be noticed."""
    has_failed: bool = False
    """True if a read of the pool failed, or its process has ended. The next hand-over then first opens the pool
    again."""


class RemotePools:
    """Owns the readers: `close` ends them.

    An open pool keeps its memory allocated even after its process has ended. Until the pool is closed, the
    process that replaces the ended one finds little free memory. So a pool of an ended process is closed
    as soon as nothing reads from it.
    """

    def __init__(self, readers: Mapping[str, PoolReader], clock: Clock) -> None:
        self._readers = readers
        self._clock = clock
        self._exits = ProcessExits()
        self._open: dict[PoolKey, _OpenPool] = {}
        self._orphaned: set[PoolKey] = set()
        """Open pools of processes that have ended."""
        self._under_way: dict[_ReadKey, tuple[PoolKey, WantedPieces]] = {}
        self._standstill = Standstill(READ_TIMEOUT_S / 4)
        self._timeouts: Timers[_ReadKey] = Timers(self._standstill)

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
        self._close(key)
        pool = self._readers[key[2]].open(description)
        self._open[key] = _OpenPool(pool, self._clock.now(), self._watch(pool))

    def read(self, key: PoolKey, pieces: WantedPieces, runs: Runs) -> None:
        """Begins to read these pieces. TransportError if the pool is not open, or refuses."""
        pool = self._open.get(key)
        if pool is None:
            raise TransportError("the peer's pool is not open")
        pool.used_at = now = self._clock.now()
        try:
            read = (key[2], pool.pool.read(runs))
        except TransportError:
            pool.has_failed = True
            raise
        self._under_way[read] = (key, pieces)
        self._standstill.look(now)
        self._timeouts.set(read, now + READ_TIMEOUT_S)

    def finished(self) -> Iterator[tuple[WantedPieces, str | None]]:
        """Reads that ended since the last call, with the error of each failed one. Ends reads that take too long."""
        overdue = self._timeouts.pop_due(self._clock.now())
        for read in overdue:
            self._close(self._under_way[read][0])
        for transport, done in self._poll():
            read = (transport, done.number)
            self._timeouts.cancel(read)
            if read in self._under_way:  # else the read was abandoned earlier
                yield self._end(read, done.error)
        for read in overdue:
            if read in self._under_way:
                yield self._end(read, f"the read did not end within {READ_TIMEOUT_S:g} s")

    def close_orphaned(self) -> None:
        """Closes the pools of processes that have ended. Pools that are being read are closed by a later call."""
        if ended := set(self._exits.take_ended()):
            orphaned = {key for key, pool in self._open.items() if pool.watch in ended}
            for key in orphaned:
                self._open[key].has_failed = True
            self._orphaned |= orphaned
        for key in sorted(self._orphaned):
            if all(key != pool for pool, _ in self._under_way.values()):
                logger.info("rank %d of %s has ended: closed its pool (%s)", key[1], key[0], key[2])
                self._close(key)

    def close_unused(self, is_needed: Callable[[str], bool]) -> None:
        """Closes pools that no hand-over has used for a while; `is_needed` says whether a producer may still send."""
        now = self._clock.now()
        for key, pool in list(self._open.items()):
            if is_needed(key[0]):
                pool.used_at = now
            elif now >= pool.used_at + IDLE_S:  # the same sum as in `next_deadline`, so that both round alike
                self._close(key)

    def close(self) -> None:
        """Closes every pool, and then the readers, which are needed to close the pools."""
        for key in list(self._open):
            self._close(key)
        for transport, reader in self._readers.items():
            try:
                reader.close()
            except TransportError as error:
                logger.warning("closing %s: %s", transport, error)
        self._exits.close()

    def next_deadline(self) -> float | None:
        """The latest time for the next call of `finished` and `close_unused`."""
        times = [pool.used_at + IDLE_S for pool in self._open.values()]
        now = self._clock.now()
        for transport, _ in self._under_way:
            if (interval_s := self._readers[transport].poll_interval_s) is not None:
                times.append(now + interval_s)
        if (timeout := self._timeouts.next()) is not None:
            times.append(timeout)
        return min(times, default=None)

    def _poll(self) -> Iterator[tuple[str, ReadDone]]:
        """Finished reads, with their transport."""
        for transport, reader in self._readers.items():
            try:
                ended = reader.poll()
            except TransportError as error:
                logger.warning("%s: %s", transport, error)
                continue
            for done in ended:
                yield transport, done

    def _end(self, read: _ReadKey, error: str | None) -> tuple[WantedPieces, str | None]:
        key, pieces = self._under_way.pop(read)
        if error is not None and key in self._open:
            self._open[key].has_failed = True
        return pieces, error

    def _watch(self, pool: RemotePool) -> int | None:
        if pool.owner_pid is None:
            return None
        try:
            return self._exits.watch(pool.owner_pid)
        except ProcessLookupError as error:
            pool.close()
            raise TransportError(f"process {pool.owner_pid} has ended") from error

    def _close(self, key: PoolKey) -> None:
        """Closes the pool. Its reads have ended when this returns."""
        pool = self._open.pop(key, None)
        if pool is None:
            return
        self._orphaned.discard(key)
        if pool.watch is not None:
            self._exits.drop(pool.watch)
        try:
            pool.pool.close()
        except TransportError as error:
            logger.warning("error while closing a pool: %s", error)


class ProcessExits:
    """Notices the end of processes on this host, by their pidfds. Belongs to one thread, which may sleep on `fileno`.

    The kernel reports every end at once, `kill -9` included, after the process has closed all its files. It reports
    nothing about a process that is stopped or only silent.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._running: set[int] = set()
        """The watches of the processes whose end `take_ended` has not reported yet."""

    def fileno(self) -> int:
        """Readable while `take_ended` has something to return."""
        return self._epoll.fileno()

    def watch(self, pid: int) -> int | None:
        """Starts a watch of the process, and returns it. Once the process has ended, `take_ended` returns the watch.

        The caller must call `drop` when it needs the watch no more. Returns None if the end cannot be noticed: the
        system has no pidfd or refuses it, or the process id is impossible. Raises ProcessLookupError if there is no
        such process.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, OverflowError):
            return None
        self._epoll.register(pidfd, select.EPOLLIN)
        self._running.add(pidfd)
        return pidfd

    def take_ended(self) -> list[int]:
        """The watches whose processes have ended; each is returned once."""
        ended = [pidfd for pidfd, _ in self._epoll.poll(0)]
        for pidfd in ended:
            self._forget(pidfd)  # else `fileno` would stay readable for ever
        return ended

    def drop(self, watch: int) -> None:
        if watch in self._running:
            self._forget(watch)
        os.close(watch)

    def close(self) -> None:
        """Closes the poller. Every watch must have been dropped before."""
        self._epoll.close()

    def _forget(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        self._running.remove(pidfd)
