"""A CUDA driver over host memory. Copies are queued, and run when a test says so.

All streams of a process share one queue. A real device may use this order, too.
"""

import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_transfer.cuda.copy_kernel import CHUNK_NBYTES, ENTRY_WORDS, MAX_BLOCKS, NO_CHUNK, NUM_THREADS
from kv_transfer.cuda.driver import HANDLE_BYTES, CudaDriver, CudaError, CudaOutOfMemory, Kernel

FIRST_ADDRESS = 1 << 40


class Copy(NamedTuple):
    """Rows of bytes, queued to be copied."""

    to: int
    source: int
    row_nbytes: int
    num_rows: int = 1
    to_pitch: int = 0
    source_pitch: int = 0


@dataclass
class FakeHost:
    """All devices of one host, and the memory allocated on them."""

    memories: dict[int, bytearray] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Memories whose owner has ended. Processes that have them open can still read them; no process can open
    them."""
    next_address: int = FIRST_ADDRESS
    pinned: dict[int, "ctypes.Array[ctypes.c_uint8]"] = field(default_factory=dict)
    """Host memory that devices can access, by address."""
    pinned_room: int | None = None
    """Limit of the bytes that may be pinned in total."""

    def allocate(self, num_bytes: int) -> int:
        address, self.next_address = self.next_address, self.next_address + num_bytes + 4096
        self.memories[address] = bytearray(num_bytes)
        return address

    def find(self, address: int, num_bytes: int) -> memoryview:
        """Device memory, or pinned host memory, at this address."""
        views = [(base, memoryview(memory)) for base, memory in self.memories.items()]
        views += [(base, memoryview(buffer).cast("B")) for base, buffer in self.pinned.items()]
        for base, view in views:
            if base <= address and address + num_bytes <= base + len(view):
                return view[address - base : address - base + num_bytes]
        raise CudaError(f"an illegal address was encountered: {address:#x}")


@dataclass
class FakeDriver(CudaDriver):
    """The driver of a device in one process."""

    host: FakeHost
    device: int = 0
    is_slow: bool = False
    """Whether copies wait for `run`."""
    takes_rows: bool = True
    """False: the driver refuses pitches, as a real driver may."""
    queued: deque[tuple[Copy, ...]] = field(default_factory=deque)
    """The copies of each call."""
    num_queued: int = 0
    num_over: int = 0
    num_made_current: int = 0
    opened: list[int] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    room: int | None = None
    """How many calls may be queued at a time. Further calls are refused."""
    failure: str | None = None
    """Once this is set, the context is lost: every call for streams and events fails."""
    streams: set[int] = field(default_factory=set)
    kernels: set[Kernel] = field(default_factory=set)
    _own: list[int] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        self._own.append(self.host.allocate(num_bytes))
        return self._own[-1]

    def free(self, address: int) -> None:
        self._own.remove(address)
        del self.host.memories[address]

    def allocate_host(self, num_bytes: int) -> int:
        room = self.host.pinned_room
        if room is not None and sum(map(len, self.host.pinned.values())) + num_bytes > room:
            raise CudaOutOfMemory("cuMemHostAlloc: out of memory (2)")
        buffer = (ctypes.c_uint8 * num_bytes)()
        address = ctypes.addressof(buffer)
        self.host.pinned[address] = buffer
        return address

    def free_host(self, address: int) -> None:
        self._check_context()
        del self.host.pinned[address]

    def share(self, address: int) -> bytes:
        return address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle[:8], "little")
        if address in self._own or address in self.host.gone or address not in self.host.memories:
            raise CudaError("cuIpcOpenMemHandle_v2: invalid resource handle (400)")
        self.opened.append(address)
        return address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def size_of(self, address: int) -> int:
        return len(self.host.memories[address])

    def make_current(self) -> None:
        self.num_made_current += 1

    def make_stream(self) -> int:
        stream = max(self.streams, default=0) + 1
        self.streams.add(stream)
        return stream

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._queue((Copy(to, source, num_bytes),), stream)

    def copy_rows(
        self,
        to: int,
        source: int,
        row_nbytes: int,
        num_rows: int,
        to_pitch: int,
        source_pitch: int,
        stream: int,
    ) -> None:
        assert row_nbytes <= min(to_pitch, source_pitch)
        assert max(to_pitch, source_pitch) < 2**31
        if not self.takes_rows:
            raise CudaError("cuMemcpy2DAsync_v2: invalid argument (1)")
        self._queue((Copy(to, source, row_nbytes, num_rows, to_pitch, source_pitch),), stream)

    def load_kernel(self, ptx: bytes, name: str) -> Kernel:
        assert f".visible .entry {name}(".encode() in ptx
        kernel = Kernel(len(self.kernels) + 1, len(self.kernels) + 1)
        self.kernels.add(kernel)
        return kernel

    def unload_kernel(self, kernel: Kernel) -> None:
        self._check_context()
        self.kernels.remove(kernel)

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, argument: npt.NDArray[np.uint64], stream: int
    ) -> None:
        """Does what copy_runs.ptx does."""
        assert kernel in self.kernels
        assert 1 <= num_blocks <= MAX_BLOCKS
        assert num_threads == NUM_THREADS
        num_chunks, entries = int(argument[0]), argument[2:].reshape(-1, ENTRY_WORDS)
        num_runs = int(np.flatnonzero(entries[:, 3] == NO_CHUNK)[0])
        chunks = [
            (run, chunk) for run in entries[:num_runs].tolist() for chunk in range(0, run[2], CHUNK_NBYTES)
        ]
        assert num_chunks == len(chunks)
        copies = []
        for number, ((source, to, length, first), offset) in enumerate(chunks):
            assert number - first == offset // CHUNK_NBYTES
            copies.append(Copy(to + offset, source + offset, min(CHUNK_NBYTES, length - offset)))
        self._queue(tuple(copies), stream)

    def _queue(self, copies: tuple[Copy, ...], stream: int) -> None:
        assert stream in self.streams
        self._check_context()
        if self.room is not None and len(self.queued) >= self.room:
            raise CudaError("cuMemcpyAsync: out of memory (2)")
        self.queued.append(copies)
        self.num_queued += 1
        if not self.is_slow:
            self.run()

    def run(self) -> None:
        """Runs all queued copies."""
        while self.queued:
            self.run_next()

    def run_next(self) -> None:
        for copy in self.queued.popleft():
            for row in range(copy.num_rows):
                to = self.host.find(copy.to + row * copy.to_pitch, copy.row_nbytes)
                to[:] = self.host.find(copy.source + row * copy.source_pitch, copy.row_nbytes)
        self.num_over += 1

    def record(self, stream: int) -> int:
        assert stream in self.streams
        self._check_context()
        event = len(self.events) + 1
        self.events[event] = self.num_queued
        return event

    def is_over(self, event: int) -> bool:
        self._check_context()
        return self.num_over >= self.events[event]

    def drop(self, event: int) -> None:
        self._check_context()
        assert self.events.get(event, -1) >= 0, "no such event, or it was dropped"
        self.events[event] = -1

    def wait(self, stream: int) -> None:
        assert stream in self.streams
        self._check_context()
        self.run()

    def drop_stream(self, stream: int) -> None:
        self._check_context()
        self.streams.remove(stream)

    def _check_context(self) -> None:
        if self.failure is not None:
            raise CudaError(self.failure)


@dataclass
class UnhurriedDriver(FakeDriver):
    """A driver that runs one call's copies at each query of an event. So reads need several polls."""

    is_slow: bool = True

    def is_over(self, event: int) -> bool:
        if self.queued:
            self.run_next()
        return super().is_over(event)
