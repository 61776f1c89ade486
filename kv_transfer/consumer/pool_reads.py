"""PoolReads: reads of peers' pools that are under way, each until it ends or takes too long; knows no protocol."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.system.standstill import Standstill
from kv_transfer.consumer.remote_pools import PoolKey, RemotePools
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.protocol.messages import Pieces
from kv_transfer.protocol.timers import Timers
from kv_transfer.transport.base import Runs

READ_TIMEOUT_S = 10.0
"""A read that takes this long will not end by itself; closing its pool ends it, and has if the pool is closed."""

ReadKey = tuple[str, int]
"""The transport, and the read's number there."""


@dataclass(frozen=True, slots=True)
class PoolRead:
    """Pieces that are being read out of a peer's pool."""

    pool: PoolKey
    message: Pieces
    wanted: WantedPieces


class PoolReads:
    """Times are the caller's, in seconds."""

    def __init__(self, pools: RemotePools) -> None:
        self._pools = pools
        self._under_way: dict[ReadKey, PoolRead] = {}
        self._standstill = Standstill(READ_TIMEOUT_S / 4)
        self._timeouts: Timers[ReadKey] = Timers(self._standstill)

    def begin(self, read: PoolRead, runs: Runs, now: float) -> None:
        """TransportError if the pool is not open, or refuses."""
        key = (read.pool[2], self._pools.read(read.pool, runs))
        self._under_way[key] = read
        self._standstill.look(now)
        self._timeouts.set(key, now + READ_TIMEOUT_S)

    def finished(self) -> Iterator[tuple[PoolRead, str | None]]:
        """Reads that ended since the last call, with the error of each that failed."""
        for transport, done in self._pools.poll():
            key = (transport, done.number)
            self._timeouts.cancel(key)
            read = self._under_way.pop(key, None)
            if read is not None:  # else it was abandoned, long after nothing wrote any more
                yield read, done.error

    def close_overdue(self, now: float) -> list[ReadKey]:
        """Closes the pools of reads that take too long, which ends them. `abandon` follows, after `finished`."""
        overdue = list(self._timeouts.pop_due(now))
        for key in overdue:
            self._pools.close_one(self._under_way[key].pool)
        return overdue

    def abandon(self, overdue: Iterable[ReadKey]) -> list[PoolRead]:
        """Those whose end was not reported although their pool was closed."""
        return [self._under_way.pop(key) for key in overdue if key in self._under_way]

    def uses(self, pool: PoolKey) -> bool:
        return any(read.pool == pool for read in self._under_way.values())

    def next_deadline(self, now: float) -> float | None:
        """When a read times out, or has to be polled for."""
        intervals = [self._pools.poll_interval_s(read.pool[2]) for read in self._under_way.values()]
        times = [now + interval for interval in intervals if interval is not None]
        return min([time for time in (*times, self._timeouts.next()) if time is not None], default=None)
