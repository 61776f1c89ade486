"""SharedMemory: taken at once, and let go with its last user."""

import gc
import os
import resource

import numpy as np
import pytest

from kv_transfer.transport.shared_memory import SharedMemory

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
