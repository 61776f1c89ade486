"""Memory that a CUDA device copies from and to, and a function that queues many copies.

CudaMemory is on the device, pinned_array on the host. `queue_copies` merges copies into few driver calls: runs of equal
length at equal distances become rows of one copy. A call costs the transfer thread some 5 us, whatever it copies. If
two workers differ in their layout, a piece of an 8 MiB block is 64 to 512 runs, and a message has several pieces. Then
the calls would take longer than the copies.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_transfer.cuda.driver import Address, CudaDriver, CudaError
from kv_transfer.transport.base import Bytes, Runs, TransportError

MAX_PITCH = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every existing device."""

MIN_ROWS = 4
"""The fewest runs that are merged into one copy. Fewer runs are copied faster one by one."""


class CudaMemory:
    """`num_bytes` bytes of a device's memory, zeroed. Other processes of this host may open them, and PyTorch accepts
    them as a tensor.

    Only `free` and the end of the process release the memory. Its owner calls `free` last, after the tensors over it,
    readers, stagers and NIXL's agents are gone. CUDA does not define what a peer reads then, if the peer still has the
    memory open. The protocol accepts none of these bytes, since no `End` follows.
    """

    def __init__(self, num_bytes: int, device: int, driver: CudaDriver | None = None) -> None:
        """CudaOutOfMemory if the device has less memory free."""
        self.driver: CudaDriver = driver if driver is not None else CudaDriver(device)
        self.nbytes = num_bytes
        self.address = self.driver.allocate(num_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """uint8 [num_bytes], for `torch.as_tensor`."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def free(self) -> None:
        self.driver.free(self.address)


def pinned_array(num_bytes: int, device: int, driver: CudaDriver | None = None) -> Bytes:
    """uint8 [num_bytes] of host memory that a device reads and writes by itself: whole pages, not zeroed.

    The memory is released with the last array or tensor over it; no copy may be running then. PyTorch's own pinned
    memory is rounded up to a power of two, which may be nearly twice as much.

    CudaOutOfMemory if the host cannot lock so much.
    """
    driver = driver if driver is not None else CudaDriver(device)
    address = driver.allocate_host(num_bytes)
    array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    # Not at exit: the operating system then releases the memory anyway.
    weakref.finalize(array, _free_host, driver, address).atexit = False
    return array


def _free_host(driver: CudaDriver, address: Address) -> None:
    with suppress(TransportError):  # a lost context has released it
        driver.free_host(address)


@dataclass(frozen=True, slots=True)
class Rows:
    """`num_rows` runs of `row_nbytes` bytes at equal distances. `remote` and `local` are the offsets of the first run;
    `remote_step` and `local_step` are the distances from one run to the next."""

    remote: int
    local: int
    row_nbytes: int
    num_rows: int = 1
    remote_step: int = 0
    local_step: int = 0


def queue_copies(driver: CudaDriver, runs: Runs, source: Address, to: Address, stream: int) -> None:
    """Queues the copies of all runs, from offsets `runs.remote` of `source` to offsets `runs.local` of `to`.

    The device must be able to access both memories. CudaError if a copy is refused; the copies before it are queued.
    """
    for rows in in_rows(runs):
        if rows.num_rows >= MIN_ROWS:
            try:
                driver.copy_rows(
                    to + rows.local,
                    source + rows.remote,
                    rows.row_nbytes,
                    rows.num_rows,
                    rows.local_step,
                    rows.remote_step,
                    stream,
                )
                continue
            except CudaError:
                # A driver may refuse pitches that cuMemAllocPitch did not choose; CUDA's manual says so of copies
                # within a device. Any other error affects the plain copies too, and they report it.
                pass
        for row in range(rows.num_rows):
            there = source + rows.remote + row * rows.remote_step
            driver.copy(to + rows.local + row * rows.local_step, there, rows.row_nbytes, stream)


def in_rows(runs: Runs) -> Iterator[Rows]:
    """The same runs in the same order, with neighbours at equal distances merged."""
    remotes, locals_, lengths = runs.remote.tolist(), runs.local.tolist(), runs.lengths.tolist()
    last = len(lengths) - 1
    remote_steps, local_steps = np.diff(runs.remote), np.diff(runs.local)
    is_step = (
        (runs.lengths[1:] == runs.lengths[:-1])
        & (np.minimum(remote_steps, local_steps) >= runs.lengths[:-1])
        & (np.maximum(remote_steps, local_steps) <= MAX_PITCH)
    )
    is_other = (remote_steps[1:] != remote_steps[:-1]) | (local_steps[1:] != local_steps[:-1])
    changes = iter([*(np.flatnonzero(is_other | ~is_step[1:] | ~is_step[:-1]) + 1).tolist(), last])
    """Indices of runs after which the step changes, so that one copy of rows may end there."""
    first, change = 0, -1
    while first <= last:
        while change <= first < last:
            change = next(changes)
        end = change if first < last and is_step[first] else first
        num_rows = end - first + 1
        if num_rows == 1:
            yield Rows(remotes[first], locals_[first], lengths[first])
        else:
            steps = int(remote_steps[first]), int(local_steps[first])
            yield Rows(remotes[first], locals_[first], lengths[first], num_rows, *steps)
        first = end + 1
