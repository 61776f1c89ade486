"""SimReader: one-sided reads of a peer's pool, which take time and may be torn, fail or never end."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.consumer.remote_pools import ProcessExits
from kv_transfer.transport.base import Bytes, ReadDone, Runs, TransportError
from simulator.world import Process, World

POLL_INTERVAL_S = 1 / 32


@dataclass(frozen=True, slots=True)
class ReadFaults:
    """How likely each fault is for a read."""

    failure: float = 0.0
    hang: float = 0.0
    damage: float = 0.0
    """How likely it is that bytes are damaged; only used where checksums must detect it."""
    refusal: float = 0.0
    """How likely it is that a pool cannot be opened."""
    max_duration_s: float = 0.01
    slowness: float = 0.0
    """How likely it is that a read takes up to `max_slow_s`, which may be longer than a lease."""
    max_slow_s: float = 4.0


@dataclass(slots=True)
class SharedPools:
    """Every pool that can be read, with its owner. Memory outlives its process while another process maps it."""

    world: World
    faults: ReadFaults
    reports_exits: bool
    """Whether watchers of a process learn that it has ended."""
    pools: dict[bytes, tuple[Process, Bytes]] = field(default_factory=dict)
    owners: list[Process] = field(default_factory=list)
    """Owners of pools, indexed by process id."""
    watchers: list["SimExits"] = field(default_factory=list)

    def add(self, description: bytes, owner: Process, pool: Bytes) -> None:
        self.pools[description] = (owner, pool)
        if owner not in self.owners:
            self.owners.append(owner)

    def report_exit(self, owner: Process) -> None:
        """Reports the end of a process to every watcher, as the kernel does."""
        for watcher in self.watchers:
            watcher.on_exit(owner)


class SimExits(ProcessExits):
    """Exits of simulated processes."""

    def __init__(self, pools: SharedPools, wake_up: Callable[[], None]) -> None:
        """`wake_up` makes the connector call `take_ended`."""
        super().__init__()
        self._pools = pools
        self._wake_up = wake_up
        self._watched: dict[int, Process] = {}
        self._ended: list[int] = []
        self._num_watches = 0
        pools.watchers.append(self)

    def watch(self, pid: int) -> int | None:
        if not self._pools.reports_exits:
            return None
        process = self._pools.owners[pid]
        if process.is_dead:
            raise ProcessLookupError
        self._num_watches += 1
        self._watched[self._num_watches] = process
        return self._num_watches

    def on_exit(self, process: Process) -> None:
        """Notes that a process has ended."""
        self._ended += [watch for watch, watched in self._watched.items() if watched is process]
        if self._ended:
            self._wake_up()

    def take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def drop(self, watch: int) -> None:
        del self._watched[watch]


class SimReader:
    """A transport that reads; with `is_instant`, a read ends as soon as it begins."""

    def __init__(
        self,
        name: str,
        pools: SharedPools,
        incarnation: str,
        pool: Bytes,
        process: Process,
        on_done: Callable[[], None],
        *,
        is_instant: bool,
        may_damage: bool,
    ) -> None:
        self.name = name
        self.poll_interval_s = None if is_instant else POLL_INTERVAL_S
        self.pools = pools
        self.pool = pool.reshape(-1)
        self.block_nbytes = pool.nbytes // len(pool)
        self.process = process
        self.on_done = on_done
        self.is_instant = is_instant
        self.may_damage = may_damage
        self.num_reads = 0
        self.mapped: list[SimPool] = []
        """Open pools of peers."""
        self._description = f"{name} {incarnation}".encode()
        self._done: list[ReadDone] = []
        pools.add(self._description, process, self.pool)

    def describe(self) -> bytes | None:
        return self._description

    def open(self, description: bytes) -> "SimPool":
        world = self.pools.world
        owner = self.pools.pools.get(description)
        if owner is None or owner[0].is_dead:
            raise TransportError("that process is gone")
        if not world.is_calm and world.chance(self.pools.faults.refusal):
            world.counts["fault pool out of reach"] += 1
            raise TransportError("the pool cannot be opened")
        pool = SimPool(self, owner[1], self.pools.owners.index(owner[0]))
        self.mapped.append(pool)
        return pool

    def poll(self) -> list[ReadDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Does nothing: nothing here outlives the process."""

    def blocks_under_way(self) -> set[int]:
        """Our blocks that reads still write."""
        blocks: set[int] = set()
        for runs in (runs for pool in self.mapped for runs in pool.under_way.values()):
            for start, length in zip(runs.local.tolist(), runs.lengths.tolist(), strict=True):
                blocks.update(range(start // self.block_nbytes, -(-(start + length) // self.block_nbytes)))
        return blocks

    def break_reads(self) -> None:
        """Makes about half of the reads under way fail."""
        for pool in self.mapped:
            for number in list(pool.under_way):
                if self.pools.world.chance(0.5):
                    pool.fail(number)

    def done(self, number: int, error: str | None) -> None:
        self._done.append(ReadDone(number, error))


@dataclass(slots=True, eq=False)
class SimPool:
    """A mapped pool of a peer. A read copies the bytes when it ends, or half of them a moment before."""

    reader: SimReader
    source: Bytes
    owner_pid: int
    is_open: bool = True
    under_way: dict[int, Runs] = field(default_factory=dict)
    read_at: float = 0.0
    """When the last read ended."""

    def read(self, runs: Runs) -> int:
        if not self.is_open:
            raise TransportError("the pool is closed")
        reader = self.reader
        world, faults = reader.pools.world, reader.pools.faults
        runs.check_within(self.source.nbytes, reader.pool.nbytes)
        reader.num_reads += 1
        number = reader.num_reads
        world.counts["reads"] += 1
        self.under_way[number] = runs
        if reader.is_instant:
            self._end(number)
            return number
        duration_s = world.between(0.0, faults.max_duration_s)
        if not world.is_calm:
            if world.chance(faults.hang):
                world.counts["fault read hangs"] += 1
                return number
            if world.chance(faults.slowness):
                world.counts["fault read slow"] += 1
                duration_s = world.between(0.0, faults.max_slow_s)
        if world.chance(0.3):
            half_s = world.between(0.0, duration_s)
            world.after(half_s, lambda: self._copy(number, slice(None, None, 2)))
        world.after(duration_s, lambda: self._end(number))
        return number

    @property
    def owner(self) -> Process:
        return self.reader.pools.owners[self.owner_pid]

    def close(self) -> None:
        """Ends the reads under way, which then write nothing more."""
        if self.is_open:
            self.is_open = False
            self.reader.mapped.remove(self)
            for number in self.under_way:
                self.reader.done(number, "the pool was closed")
            self.under_way.clear()

    def fail(self, number: int) -> None:
        """Makes the read fail after half of it was written."""
        self.reader.pools.world.counts["fault read failed"] += 1
        self._copy(number, slice(None, None, 2))
        self._finish(number)
        self.reader.done(number, "the connection broke")

    def _end(self, number: int) -> None:
        reader = self.reader
        if number not in self.under_way or reader.process.is_dead:
            return
        world, faults = reader.pools.world, reader.pools.faults
        if not world.is_calm and world.chance(faults.failure):
            self.fail(number)
        else:
            self._copy(number, slice(None))
            runs = self._finish(number)
            if reader.may_damage and not world.is_calm and world.chance(faults.damage):
                world.counts["fault read damaged"] += 1
                reader.pool[int(world.rng.choice(runs.local.tolist()))] ^= np.uint8(1)
            reader.done(number, None)
        world.log("read", f"{number} of {reader.name} ended")
        if not reader.is_instant and world.chance(0.5):
            reader.on_done()  # some transports wake their user, others are only polled

    def _finish(self, number: int) -> Runs:
        self.read_at = self.reader.pools.world.now
        return self.under_way.pop(number)

    def _copy(self, number: int, part: slice) -> None:
        runs = self.under_way.get(number)
        if runs is None or self.reader.process.is_dead:
            return
        pool = self.reader.pool
        for remote, local, length in zip(
            runs.remote[part].tolist(), runs.local[part].tolist(), runs.lengths[part].tolist(), strict=True
        ):
            pool[local : local + length] = self.source[remote : remote + length]
