"""SharedMemory: allocated at once, and freed with its last user."""

import gc
import os
import resource

import numpy as np
import pytest

from kv_transfer.transport import shared_memory
from kv_transfer.transport.base import Runs
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader

NUM_BYTES = 8 * 2**20


def test_all_of_it_is_taken_at_once_and_zero() -> None:
    memory = SharedMemory(NUM_BYTES)
    assert os.fstat(memory.fd).st_blocks * 512 == NUM_BYTES
    assert memory.array.nbytes == NUM_BYTES
    assert not memory.array.any()


def test_writing_it_for_the_first_time_faults_no_page() -> None:
    memory = SharedMemory(NUM_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.array[:: os.sysconf("SC_PAGE_SIZE")] = 1
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults < NUM_BYTES // os.sysconf("SC_PAGE_SIZE") // 4


def test_the_array_outlives_its_owner() -> None:
    memory = SharedMemory(NUM_BYTES)
    fd, array = memory.fd, memory.array
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    array[:] = 1
    assert array.sum(dtype=np.int64) == NUM_BYTES


@pytest.mark.parametrize(
    "lengths", [[8192], [1, 8191], [4096, 4096], [1000, 3096, 4096], [8191, 1], [1] * 64]
)
def test_two_threads_copy_what_one_would(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    theirs, ours = SharedMemory(2 * 8192), SharedMemory(2 * 8192)
    theirs.array[:] = np.random.default_rng(0).integers(1, 256, 2 * 8192, dtype=np.uint8)
    reader = SharedMemoryReader(ours.array, ours)
    description = SharedMemoryReader(theirs.array, theirs).describe()
    assert description is not None
    starts = np.cumsum([0, *lengths[:-1]])
    runs = Runs(starts + 100, starts + 7000, np.array(lengths))
    copies = []
    for num_bytes_for_two in (2**62, 1):
        monkeypatch.setattr(shared_memory, "MIN_BYTES_FOR_TWO", num_bytes_for_two)
        ours.array[:] = 0
        reader.open(description).read(runs)
        [done] = reader.poll()
        assert done.error is None
        copies.append(ours.array.copy())
    assert copies[0].any()
    assert (copies[0] == copies[1]).all()
    reader.close()
