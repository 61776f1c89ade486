"""Pool readers for the contract tests: all kinds, a plain one, and processes that own a pool to read."""

import multiprocessing
import os
import signal
import struct
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from baton.clock import SystemClock
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.protocol.messages import Pieces
from kv_transfer.protocol.transports import SHARED_MEMORY
from kv_transfer.transport.base import Bytes, PoolReader, ReadDone, RemotePool, Runs, TransportError
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from kv_transfer.transport.nixl import NixlReader
from kv_transfer.transport.nixl_agent import NixlMemory, nixl_is_available
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader
from tests.factories.fake_cuda import FakeHost, UnhurriedDriver
from tests.factories.transfer import KEY

START_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 30.0
"""Limit for a read. It is far above the duration of any read, even after the peer has ended."""


class ProcessMemoryPool:
    """A RemotePool over /proc. It copies at once."""

    owner_pid = None

    def __init__(self, reader: "ProcessMemoryReader", pid: int, address: int, nbytes: int) -> None:
        self._reader, self._address, self._nbytes = reader, address, nbytes
        try:
            self._file: int | None = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        except OSError as error:
            raise TransportError(f"the memory of process {pid} cannot be read: {error}") from error

    def read(self, runs: Runs) -> int:
        if self._file is None:
            raise TransportError("the pool is closed")
        runs.check_within(self._nbytes, self._reader.pool.nbytes)
        error = None
        for remote, local, length in zip(runs.remote, runs.local, runs.lengths, strict=True):
            into = self._reader.pool.reshape(-1)[local : local + length].data
            if length and os.preadv(self._file, [into], self._address + int(remote)) != length:
                error = "the process is gone"
        return self._reader.finish(error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ProcessMemoryReader:
    """The shortest PoolReader: it believes what a description says."""

    name = "process_memory"
    poll_interval_s: float | None = None

    def __init__(self, pool: Bytes) -> None:
        self.pool = pool
        self._done: list[ReadDone] = []
        self._numbers = count()

    def describe(self) -> bytes:
        return b"mem" + struct.pack("<QQQ", os.getpid(), self.pool.ctypes.data, self.pool.nbytes)

    def open(self, description: bytes) -> RemotePool:
        if len(description) != 27 or description[:3] != b"mem":
            raise TransportError("not a description")
        return ProcessMemoryPool(self, *struct.unpack("<QQQ", description[3:]))

    def finish(self, error: str | None) -> int:
        number = next(self._numbers)
        self._done.append(ReadDone(number, error))
        return number

    def poll(self) -> list[ReadDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Implementation:
    make: Callable[[Bytes], PoolReader]
    """Makes a reader over an array from `allocate`."""
    is_available: Callable[[], bool]
    needs: str
    """What a machine lacks if this is not available there."""
    allocate: Callable[[int], Bytes] = lambda nbytes: np.zeros(nbytes, np.uint8)
    """A pool of `nbytes` bytes."""


_memories: dict[int, SharedMemory] = {}
"""The shared memories of arrays, by the addresses of the arrays."""


def shared_array(nbytes: int) -> Bytes:
    memory = SharedMemory(nbytes)
    _memories[memory.array.ctypes.data] = memory
    return memory.array


_host = FakeHost()
_devices: dict[int, CudaMemory] = {}
"""The memories of pretended devices, by the addresses of the arrays that show their bytes."""


def device_array(nbytes: int) -> Bytes:
    """The bytes of memory on its own pretended device."""
    memory = CudaMemory(nbytes, 0, UnhurriedDriver(_host))
    array: Bytes = np.frombuffer(_host.memories[memory.address], np.uint8)
    _devices[array.ctypes.data] = memory
    return array


IMPLEMENTATIONS = {
    "cuda_ipc": Implementation(
        lambda pool: CudaIpcReader(_devices[pool.ctypes.data]), lambda: True, "nothing", device_array
    ),
    "shared_memory": Implementation(
        lambda pool: SharedMemoryReader(pool, _memories[pool.ctypes.data]),
        lambda: hasattr(os, "memfd_create"),
        "no memfd",
        shared_array,
    ),
    "process_memory": Implementation(ProcessMemoryReader, Path("/proc/self/mem").exists, "no /proc"),
    "nixl": Implementation(
        lambda pool: NixlReader(NixlMemory.of(pool), SystemClock()),
        nixl_is_available,
        "pip install 'baton[nixl]'",
    ),
}


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes that differ from place to place and from seed to seed."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


class Owner(AbstractContextManager["Owner"]):
    """A process that owns a pool of `pattern(nbytes, seed)`, and lets other processes read it."""

    def __init__(self, implementation: str, nbytes: int, seed: int) -> None:
        self.pattern = pattern(nbytes, seed)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=own, args=(implementation, nbytes, seed, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.description = self._answer()

    def refill(self, seed: int) -> None:
        """Overwrites the pool."""
        self._pipe.send(seed)
        self._answer()
        self.pattern = pattern(self.pattern.nbytes, seed)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Stops the process. From now on nothing in it runs."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        state = None
        while state != "T":
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def resume(self) -> None:
        """Undoes `stop`; the process runs again when this returns."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)
        self._pipe.send(None)
        self._answer()

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()

    def _answer(self) -> bytes:
        assert self._pipe.poll(START_TIMEOUT_S), "the owner of the pool does not answer"
        answer = self._pipe.recv()
        assert isinstance(answer, bytes)
        return answer


class DeviceOwner(AbstractContextManager["DeviceOwner"]):
    """Like `Owner`, for a pool on a pretended device in this process. Readers need no answers of the owner."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self._pool = device_array(nbytes)
        self._memory = _devices[self._pool.ctypes.data]
        self.description = CudaIpcReader(self._memory).describe() or b""
        self.refill(seed)

    def refill(self, seed: int) -> None:
        """Overwrites the pool."""
        self.pattern = pattern(self._pool.nbytes, seed)
        self._pool[:] = self.pattern

    def kill(self) -> None:
        _host.gone.add(self._memory.address)

    def stop(self) -> None:
        """Does nothing: a reader would not notice it."""

    def resume(self) -> None:
        """Undoes `stop`."""

    def __exit__(self, *_: object) -> None:
        self.kill()


AnyOwner = Owner | DeviceOwner


def make_owner(implementation: str, nbytes: int, seed: int) -> AnyOwner:
    return DeviceOwner(nbytes, seed) if implementation == "cuda_ipc" else Owner(implementation, nbytes, seed)


def own(implementation: str, nbytes: int, seed: int, pipe: Connection) -> None:
    """The main function of the owner's process: carries out commands until its parent has ended."""
    pool = IMPLEMENTATIONS[implementation].allocate(nbytes)
    pool[:] = pattern(nbytes, seed)
    reader = IMPLEMENTATIONS[implementation].make(pool)
    pipe.send(reader.describe())
    while True:
        try:
            new_seed = pipe.recv()
        except EOFError:
            return
        if new_seed is not None:
            pool[:] = pattern(nbytes, new_seed)
        pipe.send(b"")


def finish(reader: PoolReader, numbers: Collection[int]) -> dict[int, str | None]:
    """Polls until all these reads have ended; returns their errors."""
    clock = SystemClock()
    deadline = clock.now() + READ_TIMEOUT_S
    errors: dict[int, str | None] = {}
    while not errors.keys() >= set(numbers):
        assert clock.now() < deadline, f"reads {set(numbers) - errors.keys()} do not end"
        for done in reader.poll():
            assert done.number not in errors, "a read ended twice"
            errors[done.number] = done.error
    return errors


def any_pieces() -> WantedPieces:
    """Some wanted pieces, for tests in which their number does not matter."""
    return WantedPieces(Pieces(KEY, 0, (), (), ()), SHARED_MEMORY, False, [], [], [])


def make_runs(*runs: tuple[int, int, int]) -> Runs:
    """Runs from tuples of remote offset, local offset and length."""
    columns = np.array(runs, np.int64).reshape(-1, 3)
    return Runs(*(np.ascontiguousarray(column) for column in columns.T))
