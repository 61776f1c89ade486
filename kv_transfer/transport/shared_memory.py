"""Shared memory: on one host, a consumer maps the producer's pool and copies out of it; one copy, no socket.

The pool is in a sealed memfd. A memfd has no name in any file system, so it disappears with the last process that maps
it. A sealed memfd cannot shrink, so reading it cannot fail half-way.
"""

import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np

from baton.errors import WireError
from baton.messages.wire import unpack
from kv_transfer.protocol.transports import SHARED_MEMORY
from kv_transfer.transport.base import Bytes, ReadDone, Runs, TransportError

FORMAT = 1
MIN_BYTES_FOR_TWO = 2 * 1024 * 1024
"""Two threads share a read of at least this size, since one core seldom uses all of the memory's bandwidth."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """`num_bytes` zeroed bytes that other processes of this host and user may map.

    All of it is allocated at once. Otherwise, the first use of a block during a hand-over would cause page faults,
    which take several times as long as the copy. OSError if the system has too little memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        mapped = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.array: Bytes = np.frombuffer(mapped, np.uint8)

    def __del__(self) -> None:
        os.close(self.fd)


class SharedMemoryReader:
    """Reads pools in other processes' `SharedMemory`. `memory` has our own pool; None if it is in other memory."""

    name = SHARED_MEMORY
    poll_interval_s = None

    def __init__(self, pool: Bytes, memory: SharedMemory | None) -> None:
        self._pool = pool.reshape(-1)
        self._memory = memory
        self._copier = ThreadPoolExecutor(1, "kv-copy")
        # The executor's first call starts its thread. If no thread can start, the worker ends now, not at its first
        # large read.
        self._copier.submit(int)
        self._done: list[ReadDone] = []
        self._num_reads = 0

    def describe(self) -> bytes | None:
        if self._memory is None:
            return None
        stat = os.fstat(self._memory.fd)
        description: bytes = msgpack.packb([FORMAT, os.getpid(), self._memory.fd, stat.st_ino, stat.st_size])
        return description

    def open(self, description: bytes) -> "MappedPool":
        pid, fd, inode, num_bytes = _parse(description)
        try:
            # O_NONBLOCK: if the pid belongs to another process by now, the file may be a pipe, which waits for a
            # writer.
            ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportError(f"cannot map the memory of process {pid}: {error}") from error
        try:
            stat = os.fstat(ours)
            if (stat.st_ino, stat.st_size) != (inode, num_bytes):
                raise TransportError(f"process {pid} is not the process that shared its memory")
            if fcntl.fcntl(ours, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise TransportError(f"the memory of process {pid} may shrink")
            mapped = np.frombuffer(mmap.mmap(ours, num_bytes, prot=mmap.PROT_READ), np.uint8)
            return MappedPool(self, pid, mapped)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map the memory of process {pid}: {error}") from error
        finally:
            os.close(ours)

    def copy(self, source: Bytes, runs: Runs) -> int:
        """Copies at once; returns the number of the finished read."""
        runs.check_within(source.nbytes, self._pool.nbytes)
        if runs.lengths.sum() < MIN_BYTES_FOR_TWO:
            _copy(source, self._pool, runs)
        else:
            first, second = _halves(runs)
            other = self._copier.submit(_copy, source, self._pool, second)
            _copy(source, self._pool, first)
            other.result()
        self._num_reads += 1
        self._done.append(ReadDone(self._num_reads, None))
        return self._num_reads

    def poll(self) -> list[ReadDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends the thread that copies. A mapped pool is unmapped when the last array over it is gone."""
        self._copier.shutdown()


class MappedPool:
    """Another process's pool in our address space."""

    def __init__(self, reader: SharedMemoryReader, owner_pid: int, source: Bytes) -> None:
        self.owner_pid = owner_pid
        self._reader = reader
        self._source: Bytes | None = source

    def read(self, runs: Runs) -> int:
        if self._source is None:
            raise TransportError("the pool is closed")
        return self._reader.copy(self._source, runs)

    def close(self) -> None:
        self._source = None  # drops the last reference to the mapping


def _copy(source: Bytes, target: Bytes, runs: Runs) -> None:
    for remote, local, length in zip(
        runs.remote.tolist(), runs.local.tolist(), runs.lengths.tolist(), strict=True
    ):
        target[local : local + length] = source[remote : remote + length]


def _halves(runs: Runs) -> tuple[Runs, Runs]:
    """The same runs in two parts with half of the bytes each; one run may be cut in two."""
    ends = np.cumsum(runs.lengths)
    middle = ends[-1] // 2
    cut = int(np.searchsorted(ends, middle))
    num_first = middle - (ends[cut] - runs.lengths[cut])
    first = Runs(runs.remote[: cut + 1], runs.local[: cut + 1], runs.lengths[: cut + 1].copy())
    second = Runs(runs.remote[cut:].copy(), runs.local[cut:].copy(), runs.lengths[cut:].copy())
    first.lengths[-1] = num_first
    second.remote[0] += num_first
    second.local[0] += num_first
    second.lengths[0] -= num_first
    return first, second


def _parse(description: bytes) -> tuple[int, int, int, int]:
    """Process id, file descriptor, inode and size."""
    try:
        parts = unpack(description)
    except WireError as error:
        raise TransportError(f"the peer's pool description is not one of shared memory: {error}") from error
    is_valid = isinstance(parts, list) and len(parts) == 5 and all(type(part) is int for part in parts)
    if not is_valid or parts[0] != FORMAT or min(parts) < 0:
        raise TransportError("the peer's pool description is not one of shared memory")
    return parts[1], parts[2], parts[3], parts[4]
