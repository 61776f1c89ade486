"""Merges many device copies into few driver calls: runs of equal length at equal distances become rows of one copy.

A call costs the transfer thread some 5 us, whatever it copies. If two workers differ in their layout, a piece of an 8
MiB block is 64 to 512 runs, and a message has several pieces. The calls would then take longer than the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kv_transfer.cuda.driver import Address, CudaDriver, CudaError
from kv_transfer.transport.base import Runs

MAX_PITCH = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every existing device."""

MIN_ROWS = 4
"""Fewest rows of one copy. Any two runs are at equal distances, and devices are fastest at plain copies."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`num_rows` runs of `row_nbytes` bytes; offsets are of the first, steps from each to the next."""

    remote: int
    local: int
    row_nbytes: int
    num_rows: int = 1
    remote_step: int = 0
    local_step: int = 0


def queue_copies(driver: CudaDriver, runs: Runs, source: Address, to: Address, stream: int) -> None:
    """Queues copies from `runs.remote` after `source` to `runs.local` after `to`; the device must reach both.

    CudaError if one is refused; those before it are queued.
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
                # Within a device, a driver may refuse pitches that cuMemAllocPitch did not choose. Any other error
                # affects the plain copies too, and they report it.
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
    """Runs up to which the steps are equal, so that a row of copies may end there."""
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
