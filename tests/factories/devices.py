"""A device and its processes: a real device, or a pretended one whose processes are threads."""

import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch

from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.transport.base import Bytes
from tests.factories.fake_cuda import FakeHost, UnhurriedDriver

PATIENCE_S = 120.0
"""Limit for an answer of another process, which may have to load PyTorch and then a device."""


class Device(Protocol):
    """One device as a process sees it."""

    def allocate(self, num_bytes: int) -> CudaMemory: ...

    def write(self, memory: CudaMemory, array: Bytes) -> None:
        """Fills the memory. The bytes have arrived when this returns."""
        ...

    def read(self, memory: CudaMemory) -> Bytes:
        """A copy of the whole memory."""
        ...

    def start(self, run: Callable[["Device", Connection], None]) -> "Process":
        """Starts another process on the same device."""
        ...


class Process:
    """Runs a function with a device and one end of a pipe. `pipe` is the other end."""

    def __init__(self, runner: Any, pipe: Connection, kill: Callable[[], None]) -> None:
        self._runner = runner
        self.pipe = pipe
        self.kill = kill
        """Ends the process at once. On a pretended device, its memory then counts as freed."""
        runner.start()

    def answer(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the other process does not answer"
        return self.pipe.recv()

    def end(self) -> None:
        """Waits for a process that was told to end. Use `kill` for other processes."""
        self._runner.join(PATIENCE_S)
        assert not self._runner.is_alive(), "the other process does not end"


@dataclass(frozen=True, slots=True)
class RealDevice:
    """CUDA's device with this number."""

    number: int = 0

    def allocate(self, num_bytes: int) -> CudaMemory:
        return CudaMemory(num_bytes, self.number)

    def write(self, memory: CudaMemory, array: Bytes) -> None:
        """Writes as an engine does: on PyTorch's stream, with an event to wait for."""
        torch.as_tensor(memory, device=f"cuda:{self.number}").copy_(torch.from_numpy(array))
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.number))
        event.synchronize()

    def read(self, memory: CudaMemory) -> Bytes:
        array: Bytes = torch.as_tensor(memory, device=f"cuda:{self.number}").cpu().numpy()
        return array

    def start(self, run: Callable[[Device, Connection], None]) -> Process:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(self, theirs), daemon=True)

        def kill() -> None:
            process.kill()
            process.join()

        return Process(process, ours, kill)


@dataclass(frozen=True, slots=True)
class PretendedDevice:
    """A device without hardware. Each process has its own driver. Copies run when their event is queried."""

    host: FakeHost = field(default_factory=FakeHost)

    def allocate(self, num_bytes: int) -> CudaMemory:
        return CudaMemory(num_bytes, 0, UnhurriedDriver(self.host))

    def write(self, memory: CudaMemory, array: Bytes) -> None:
        self.host.memories[memory.address][:] = array.tobytes()

    def read(self, memory: CudaMemory) -> Bytes:
        return np.frombuffer(bytes(self.host.memories[memory.address]), np.uint8)

    def start(self, run: Callable[[Device, Connection], None]) -> Process:
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=run, args=(self, theirs), daemon=True)
        before = set(self.host.memories)

        def kill() -> None:
            self.host.gone.update(self.host.memories.keys() - before)

        return Process(thread, ours, kill)
