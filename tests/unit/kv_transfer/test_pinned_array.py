"""Pinned host memory by the array: exactly the requested size, for as long as an array or a tensor uses it."""

import gc

import pytest
import torch

from kv_transfer import CudaOutOfMemory, pinned_array
from tests.factories.fake_cuda import FakeDriver, FakeHost

NUM_BYTES = 9 * 4096 + 5
"""No power of two, and no whole pages."""


def pinned_sizes(host: FakeHost) -> list[int]:
    return [len(buffer) for buffer in host.pinned.values()]


def test_it_is_as_large_as_asked_and_the_devices_to_reach() -> None:
    host = FakeHost()
    array = pinned_array(NUM_BYTES, 0, FakeDriver(host))
    assert array.shape == (NUM_BYTES,)
    assert pinned_sizes(host) == [NUM_BYTES], "nothing is rounded up"
    array[-1] = 7
    assert host.find(array.ctypes.data + NUM_BYTES - 1, 1)[0] == 7


def test_it_is_given_back_with_the_last_tensor_over_it() -> None:
    host = FakeHost()
    blocks_MB = torch.from_numpy(pinned_array(NUM_BYTES - 5, 0, FakeDriver(host))).view(9, 4096)
    first_B = blocks_MB[0]
    del blocks_MB
    gc.collect()
    first_B.fill_(3)
    assert pinned_sizes(host) == [NUM_BYTES - 5]
    del first_B
    gc.collect()
    assert pinned_sizes(host) == []


def test_a_context_that_is_lost_took_it_along(capsys: pytest.CaptureFixture[str]) -> None:
    driver = FakeDriver(FakeHost())
    array = pinned_array(NUM_BYTES, 0, driver)
    driver.failure = "an illegal address was encountered (700)"
    del array
    gc.collect()
    assert capsys.readouterr().err == ""


def test_more_than_the_host_can_lock_is_refused() -> None:
    host = FakeHost(pinned_room=NUM_BYTES)
    with pytest.raises(CudaOutOfMemory):
        pinned_array(NUM_BYTES + 1, 0, FakeDriver(host))
    assert pinned_array(NUM_BYTES, 0, FakeDriver(host)).nbytes == NUM_BYTES
