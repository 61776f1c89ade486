"""CUDA IPC: on one host, a consumer's device copies straight out of the producer's device memory.

One kernel copies all runs of a read. It is queued on a stream of its own, and an event reports its end. No thread
waits for it, except when a pool is closed. The kernel waits for no kernel of the engine, but shares the
multiprocessors with them.
"""

import os
from collections.abc import Callable
from contextlib import suppress

import msgpack

from baton.errors import WireError
from baton.messages.wire import unpack
from kv_transfer.cuda.copy_kernel import CopyKernel
from kv_transfer.cuda.driver import HANDLE_BYTES, Address
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.protocol.transports import CUDA_IPC
from kv_transfer.transport.base import ReadDone, Runs, TransportError

FORMAT = 1
NUM_EARLY_POLLS = 6
"""After a read has begun or ended, this many polls follow at the short interval. When a read begins, two of these polls
come at once: one after its message, and one at the end of the turn."""
EARLY_POLL_INTERVAL_S = 0.0001
"""The short interval. On an idle device, copying 64 MiB takes less time than this."""
POLL_INTERVAL_S = 0.0005


class CudaIpcReader:
    """Reads pools in another process's `CudaMemory` into ours."""

    name = CUDA_IPC

    def __init__(self, memory: CudaMemory) -> None:
        """CudaError if the system does not let processes share a device's memory, as in some containers, or if the
        driver is older than CUDA 12.1.
        """
        self._memory = memory
        self._driver = memory.driver
        self._handle = self._driver.share(memory.address)
        self._kernel = CopyKernel(self._driver)
        self._stream = self._driver.make_stream()
        self._under_way: dict[int, int] = {}
        """Current reads: by number, the event that completes when the read has ended."""
        self._done: list[ReadDone] = []
        self._num_reads = 0
        self._num_polls = 0
        """Number of polls since a read last began or ended."""

    @property
    def poll_interval_s(self) -> float:
        return EARLY_POLL_INTERVAL_S if self._num_polls < NUM_EARLY_POLLS else POLL_INTERVAL_S

    def describe(self) -> bytes | None:
        description: bytes = msgpack.packb([FORMAT, os.getpid(), self._handle, self._memory.nbytes])
        return description

    def open(self, description: bytes) -> "CudaPool":
        pid, handle, num_bytes = _parse(description)
        if handle == self._handle:  # a process cannot open the memory that it shares itself
            return CudaPool(self, None, self._memory.address, num_bytes, lambda: None)
        address = self._driver.open(handle)
        try:
            self._check_size(address, num_bytes)
        except TransportError:
            self._driver.close(address)
            raise
        return CudaPool(self, pid, address, num_bytes, lambda: self._driver.close(address))

    def begin(self, source: Address, num_bytes: int, runs: Runs) -> int:
        """Queues the copies; see `RemotePool.read`. If only some copies can be queued, waits for these, then raises."""
        runs.check_within(num_bytes, self._memory.nbytes)
        try:
            self._kernel.queue(runs.coalesced(), source, self._memory.address, self._stream)
            event = self._driver.record(self._stream)
        except TransportError:
            self._wait()
            raise
        self._num_reads += 1
        self._num_polls = 0
        self._under_way[self._num_reads] = event
        return self._num_reads

    def poll(self) -> list[ReadDone]:
        self._num_polls += 1
        for number, event in list(self._under_way.items()):
            try:
                if not self._driver.is_over(event):
                    break  # later reads have not ended, since the stream is in order
            except TransportError as error:
                self._wait()
                self._end(number, str(error))
            else:
                self._end(number, None)
        done, self._done = self._done, []
        return done

    def finish(self) -> None:
        """Waits until every read has ended. Within a host, this takes as long as the copies."""
        error = self._wait()
        for number in list(self._under_way):
            self._end(number, error)

    def close(self) -> None:
        self.finish()
        try:
            self._driver.drop_stream(self._stream)
        finally:
            self._kernel.close()

    def _wait(self) -> str | None:
        """Waits until no queued copy can write any more. If bytes may be missing, returns why.

        A wait fails only if the device's context is lost, with everything that was queued there.
        """
        try:
            self._driver.wait(self._stream)
        except TransportError as error:
            return str(error)
        return None

    def _end(self, number: int, error: str | None) -> None:
        self._num_polls = 0
        event = self._under_way.pop(number)
        self._done.append(ReadDone(number, error))
        with suppress(TransportError):  # lost with its context
            self._driver.drop(event)

    def _check_size(self, address: Address, num_bytes: int) -> None:
        """Raises TransportError if `num_bytes` is too large: a read beyond the memory would also end our kernels."""
        real = self._driver.size_of(address)
        if num_bytes > real:
            raise TransportError(
                f"the description says {num_bytes} bytes, but the device memory has {real} bytes"
            )


class CudaPool:
    """Another process's device memory, mapped. The memory stays allocated until this is closed."""

    def __init__(
        self,
        reader: CudaIpcReader,
        owner_pid: int | None,
        address: Address,
        num_bytes: int,
        unmap: Callable[[], None],
    ) -> None:
        self.owner_pid = owner_pid
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


def _parse(description: bytes) -> tuple[int, bytes, int]:
    """Process id, handle, and the size of the shared memory."""
    try:
        parts = unpack(description)
    except WireError as error:
        raise TransportError(f"the peer's pool description is not one of device memory: {error}") from error
    is_valid = isinstance(parts, list) and [type(part) for part in parts] == [int, int, bytes, int]
    if not is_valid or parts[0] != FORMAT or len(parts[2]) != HANDLE_BYTES or parts[3] < 0:
        raise TransportError("the peer's pool description is not one of device memory")
    return parts[1], parts[2], parts[3]
