"""CUDA IPC: on one host, a consumer's device copies straight out of the producer's device memory.

Copies are queued on a stream of their own and are over when an event says so; no thread waits for them, and no kernel
of the engine is between them.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgpack

from baton.errors import WireError
from baton.wire import unpack
from kv_transfer.protocol.transports import CUDA_IPC
from kv_transfer.transport.base import Bytes, ReadDone, Runs, TransportError
from kv_transfer.transport.cuda_driver import HANDLE_BYTES, Address, CudaDriver

FORMAT = 1
POLL_INTERVAL_S = 0.0005


class Driver(Protocol):
    """What of CudaDriver is needed here."""

    device: int

    def allocate(self, num_bytes: int) -> Address: ...
    def free(self, address: Address) -> None: ...
    def share(self, address: Address) -> bytes: ...
    def open(self, handle: bytes) -> Address: ...
    def close(self, address: Address) -> None: ...
    def size_of(self, address: Address) -> int: ...
    def make_stream(self) -> int: ...
    def copy(self, to: Address, source: Address, num_bytes: int, stream: int) -> None: ...
    def record(self, stream: int) -> int: ...
    def is_over(self, event: int) -> bool: ...
    def drop(self, event: int) -> None: ...
    def wait(self, stream: int) -> None: ...
    def drop_stream(self, stream: int) -> None: ...


class CudaMemory:
    """`num_bytes` zeros on a device that other processes of this host may open. PyTorch takes it as a tensor."""

    def __init__(self, num_bytes: int, device: int, driver: Driver | None = None) -> None:
        self.driver: Driver = driver if driver is not None else CudaDriver(device)
        self.nbytes = num_bytes
        self.address = self.driver.allocate(num_bytes)
        self._stream: int | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """uint8 [num_bytes], for `torch.as_tensor`; this object must outlive the tensor."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def read(self, runs: Runs, into: Bytes) -> None:
        """Copies from `runs.local` of the device to `runs.remote` of `into`, and returns when it is there."""
        self._copy(runs, into.ctypes.data, is_read=True)

    def write(self, runs: Runs, source: Bytes) -> None:
        """Copies from `runs.remote` of `source` to `runs.local` of the device, and returns when it is there."""
        self._copy(runs, source.ctypes.data, is_read=False)

    def _copy(self, runs: Runs, host: Address, *, is_read: bool) -> None:
        if self._stream is None:
            self._stream = self.driver.make_stream()
        for there, here, length in zip(
            runs.remote.tolist(), runs.local.tolist(), runs.lengths.tolist(), strict=True
        ):
            ends = (host + there, self.address + here)
            self.driver.copy(*(ends if is_read else ends[::-1]), length, self._stream)
        self.driver.wait(self._stream)

    def free(self) -> None:
        """No tensor over it and no peer's read may be left."""
        self.driver.free(self.address)


class CudaIpcReader:
    """Reads pools that are in another process's `CudaMemory`, into ours."""

    name = CUDA_IPC
    poll_interval_s = POLL_INTERVAL_S

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._driver = memory.driver
        self._stream = self._driver.make_stream()
        self._handle = self._driver.share(memory.address)
        self._under_way: dict[int, int] = {}
        """The event that ends each read."""
        self._done: list[ReadDone] = []
        self._num_reads = 0

    def describe(self) -> bytes | None:
        description: bytes = msgpack.packb([FORMAT, os.getpid(), self._handle, self._memory.nbytes])
        return description

    def open(self, description: bytes) -> "CudaPool":
        handle, num_bytes = _parse(description)
        if handle == self._handle:  # a process cannot open what it shares itself
            return CudaPool(self, self._memory.address, num_bytes, lambda: None)
        address = self._driver.open(handle)
        try:
            self._check_size(address, num_bytes)
        except TransportError:
            self._driver.close(address)
            raise
        return CudaPool(self, address, num_bytes, lambda: self._driver.close(address))

    def begin(self, source: Address, num_bytes: int, runs: Runs) -> int:
        """Queues the copies; see `RemotePool.read`. If only some can be queued, it waits until those are over."""
        runs.check_within(num_bytes, self._memory.nbytes)
        runs = runs.coalesced()
        try:
            for remote, local, length in zip(
                runs.remote.tolist(), runs.local.tolist(), runs.lengths.tolist(), strict=True
            ):
                self._driver.copy(self._memory.address + local, source + remote, length, self._stream)
            event = self._driver.record(self._stream)
        except TransportError:
            self._wait()
            raise
        self._num_reads += 1
        self._under_way[self._num_reads] = event
        return self._num_reads

    def poll(self) -> list[ReadDone]:
        for number, event in list(self._under_way.items()):
            try:
                if not self._driver.is_over(event):
                    break  # the stream is in order
            except TransportError as error:
                self._wait()
                self._end(number, str(error))
            else:
                self._end(number, None)
        done, self._done = self._done, []
        return done

    def finish(self) -> None:
        """Waits for every read; on one host that is as long as the copies take."""
        error = self._wait()
        for number in list(self._under_way):
            self._end(number, error)

    def close(self) -> None:
        self.finish()
        self._driver.drop_stream(self._stream)

    def _wait(self) -> str | None:
        """Nothing that was queued writes any more when this returns; why it may not have been written.

        A wait fails only where the device's context is lost, and with it everything that was queued there.
        """
        try:
            self._driver.wait(self._stream)
        except TransportError as error:
            return str(error)
        return None

    def _end(self, number: int, error: str | None) -> None:
        event = self._under_way.pop(number)
        self._done.append(ReadDone(number, error))
        with suppress(TransportError):  # it is lost with its context
            self._driver.drop(event)

    def _check_size(self, address: Address, num_bytes: int) -> None:
        """To read beyond the memory's end would end every kernel of ours too."""
        real = self._driver.size_of(address)
        if num_bytes > real:
            raise TransportError(
                f"a description of {num_bytes} bytes stands for {real} bytes of device memory"
            )


class CudaPool:
    """Another process's device memory, mapped."""

    def __init__(
        self, reader: CudaIpcReader, address: Address, num_bytes: int, unmap: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._address = address
        self._num_bytes = num_bytes
        self._unmap: Callable[[], None] | None = unmap

    def read(self, runs: Runs) -> int:
        if self._unmap is None:
            raise TransportError("the pool is closed")
        return self._reader.begin(self._address, self._num_bytes, runs)

    def close(self) -> None:
        if self._unmap is not None:
            self._reader.finish()
            unmap, self._unmap = self._unmap, None
            unmap()


def _parse(description: bytes) -> tuple[bytes, int]:
    """The handle, and the size of what it stands for."""
    try:
        parts = unpack(description)
    except WireError as error:
        raise TransportError(f"not a description of device memory: {error}") from error
    is_valid = isinstance(parts, list) and [type(part) for part in parts] == [int, int, bytes, int]
    if not is_valid or parts[0] != FORMAT or len(parts[2]) != HANDLE_BYTES or parts[3] < 0:
        raise TransportError("not a description of device memory")
    return parts[2], parts[3]
