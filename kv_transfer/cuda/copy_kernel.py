"""CopyKernel: copies runs of bytes between addresses of devices, many runs in one launch (copy_runs.ptx).

A launch takes the processor some 20 us, and the device copies at the speed of its memory. A copy by the driver
out of another process's memory takes about 38 us, and 8 us more for each MiB (measured on an H200).
"""

from pathlib import Path

import numpy as np

from kv_transfer.cuda.driver import Address, CudaDriver, CudaError
from kv_transfer.transport.base import Runs

NAME = "copy_runs"
CHUNK_NBYTES = 4096
NUM_THREADS = 512
CHUNKS_PER_BLOCK = NUM_THREADS // 32
"""Each warp copies one chunk at a time."""

MAX_BLOCKS = 128
"""Thread blocks of a launch. Each has 64 KiB in flight. Together, they keep a device's memory busy. On a large device,
each of them leaves more than half of its multiprocessor to the kernels of a step."""

ENTRY_WORDS = 4
MAX_RUNS = 1022
"""The most runs of one launch. Together with the table's closing entry, their entries fill a kernel's arguments, which
may have almost 32 KiB."""

TABLE_WORDS = 2 + ENTRY_WORDS * (MAX_RUNS + 1)
NO_CHUNK = np.uint64(2**64 - 1)


class CopyKernel:
    """The kernel, loaded on one device. Loading takes some milliseconds, since the driver then compiles the kernel."""

    def __init__(self, driver: CudaDriver) -> None:
        """CudaError if the driver cannot compile it."""
        self._driver = driver
        try:
            self._kernel = driver.load_kernel(Path(__file__).with_name(f"{NAME}.ptx").read_bytes(), NAME)
        except CudaError as error:
            raise CudaError(f"{error}; copies need a driver of CUDA 12.1 or later") from error

    def queue(self, runs: Runs, source: Address, to: Address, stream: int) -> None:
        """Queues the copies of all runs, from offsets `runs.remote` of `source` to offsets `runs.local` of `to`.

        They run in no particular order, so no byte may be both read and written. The device must be able to access both
        memories.

        CudaError if a launch is refused; the launches before it are queued.
        """
        for first in range(0, len(runs.lengths), MAX_RUNS):
            part = slice(first, first + MAX_RUNS)
            lengths = runs.lengths[part]
            num_chunks = -(-lengths // CHUNK_NBYTES)
            ends = np.cumsum(num_chunks)
            table = np.zeros(TABLE_WORDS, np.uint64)
            table[0] = ends[-1]
            entries = table[2:].reshape(-1, ENTRY_WORDS)
            entries[: len(lengths), 0] = source + runs.remote[part]
            entries[: len(lengths), 1] = to + runs.local[part]
            entries[: len(lengths), 2] = lengths
            entries[: len(lengths), 3] = ends - num_chunks
            entries[len(lengths), 3] = NO_CHUNK
            num_blocks = min(MAX_BLOCKS, -(-int(ends[-1]) // CHUNKS_PER_BLOCK))
            if num_blocks:
                self._driver.launch(self._kernel, num_blocks, NUM_THREADS, table, stream)

    def close(self) -> None:
        """Unloads the kernel. No launch may be running."""
        self._driver.unload_kernel(self._kernel)
