"""A CUDA driver over host memory: copies are queued, and happen when a test says so."""

import ctypes
from collections import deque
from dataclasses import dataclass, field

from kv_transfer.transport.cuda_driver import HANDLE_BYTES, CudaError

FIRST_ADDRESS = 1 << 40


@dataclass
class FakeHost:
    """All devices of one host, and what is allocated on them."""

    memories: dict[int, bytearray] = field(default_factory=dict)
    next_address: int = FIRST_ADDRESS

    def allocate(self, num_bytes: int) -> int:
        address, self.next_address = self.next_address, self.next_address + num_bytes + 4096
        self.memories[address] = bytearray(num_bytes)
        return address

    def find(self, address: int, num_bytes: int) -> memoryview:
        """Device memory by its address, or the host's own."""
        if not FIRST_ADDRESS <= address < self.next_address:
            return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        for base, memory in self.memories.items():
            if base <= address and address + num_bytes <= base + len(memory):
                return memoryview(memory)[address - base : address - base + num_bytes]
        raise CudaError(f"an illegal address was encountered: {address:#x}")


@dataclass
class FakeDriver:
    """One process's view of a device."""

    host: FakeHost
    device: int = 0
    is_slow: bool = False
    """Copies wait for `run`."""
    queued: deque[tuple[int, int, int]] = field(default_factory=deque)
    num_queued: int = 0
    num_over: int = 0
    opened: list[int] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    room: int | None = None
    """How many copies may be queued at a time; one more is refused."""
    failure: str | None = None
    """Once set, the context is lost: every call about streams and events fails."""
    _own: list[int] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        self._own.append(self.host.allocate(num_bytes))
        return self._own[-1]

    def free(self, address: int) -> None:
        self._own.remove(address)
        del self.host.memories[address]

    def share(self, address: int) -> bytes:
        return address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle[:8], "little")
        if address in self._own or address not in self.host.memories:
            raise CudaError("cuIpcOpenMemHandle_v2: invalid resource handle (400)")
        self.opened.append(address)
        return address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def size_of(self, address: int) -> int:
        return len(self.host.memories[address])

    def make_stream(self) -> int:
        return 1

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        assert stream == 1
        self._check_context()
        if self.room is not None and len(self.queued) >= self.room:
            raise CudaError("cuMemcpyAsync: out of memory (2)")
        self.queued.append((to, source, num_bytes))
        self.num_queued += 1
        if not self.is_slow:
            self.run()

    def run(self) -> None:
        """Everything that is queued happens."""
        while self.queued:
            to, source, num_bytes = self.queued.popleft()
            self.host.find(to, num_bytes)[:] = self.host.find(source, num_bytes)
            self.num_over += 1

    def record(self, stream: int) -> int:
        assert stream == 1
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
        assert stream == 1
        self._check_context()
        self.run()

    def drop_stream(self, stream: int) -> None:
        assert stream == 1
        self._check_context()

    def _check_context(self) -> None:
        if self.failure is not None:
            raise CudaError(self.failure)
