"""A start that finds too little GPU memory waits, if other processes hold some."""

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch

from baton.clock import VirtualClock
from baton.config import BatonConfig
from baton.errors import ConfigError
from engine.gpu.memory import GIB, OutOfGpuMemory
from engine.gpu.memory_wait import LIMIT_S, RETRY_S, MemoryWait, make_memory_wait
from kv_transfer.consumer.remote_pools import IDLE_S

TOTAL = 80 * GIB


class Gpu:
    """A GPU on which another process holds memory until a given time, on a clock that only sleeping advances."""

    def __init__(self, used_by_others: int, until_s: float) -> None:
        self.clock = VirtualClock()
        self._used = used_by_others
        self._until_s = until_s
        self.num_released = 0

    @property
    def used_by_others(self) -> int:
        return self._used if self.clock.now() < self._until_s else GIB

    def wait(self) -> MemoryWait:
        return MemoryWait(lambda: self.used_by_others, self._release, self.clock, self.clock.advance)

    def take(self, num_bytes: int, error: type[Exception] = OutOfGpuMemory) -> Callable[[], int]:
        """Gives so many bytes as soon as there are so many."""

        def take() -> int:
            if num_bytes > TOTAL - self.used_by_others:
                raise error("out of GPU memory: 1 + 1")
            return num_bytes

        return take

    def _release(self) -> None:
        self.num_released += 1


@pytest.mark.parametrize("error", [OutOfGpuMemory, torch.OutOfMemoryError])
def test_a_start_outlives_the_worker_that_it_replaces(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(used_by_others=int(40.1 * GIB), until_s=7.5)
    assert gpu.wait().until_it_fits(gpu.take(60 * GIB, error)) == 60 * GIB
    assert gpu.clock.now() == 8 * RETRY_S
    assert gpu.num_released == 8, "what was taken in vain is given back before it is taken again"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "waiting up to 60 s: 40.1 GiB of the GPU are in use by other processes"


def test_without_memory_held_by_others_it_fails_at_once() -> None:
    gpu = Gpu(used_by_others=GIB, until_s=1000.0)
    with pytest.raises(ConfigError, match="out of GPU memory") as refused:
        gpu.wait().until_it_fits(gpu.take(81 * GIB))
    assert type(refused.value) is ConfigError, "ranks report an error by the name of its class"
    assert gpu.clock.now() == 0.0


def test_what_does_not_fit_either_when_the_others_are_gone_fails_then() -> None:
    gpu = Gpu(used_by_others=40 * GIB, until_s=5.0)
    with pytest.raises(ConfigError):
        gpu.wait().until_it_fits(gpu.take(81 * GIB))
    assert gpu.clock.now() == 5.0


@pytest.mark.parametrize(
    ("error", "raised"), [(OutOfGpuMemory, ConfigError), (torch.OutOfMemoryError, torch.OutOfMemoryError)]
)
def test_a_neighbour_that_stays_is_waited_for_once_in_a_start(
    error: type[Exception], raised: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(used_by_others=40 * GIB, until_s=1000.0)
    wait = gpu.wait()
    assert wait.until_it_fits(gpu.take(30 * GIB)) == 30 * GIB
    for _ in range(2):
        with pytest.raises(raised):
            wait.until_it_fits(gpu.take(60 * GIB, error))
        assert gpu.clock.now() == LIMIT_S
    assert len(caplog.records) == 1


def test_other_errors_pass_at_once() -> None:
    gpu = Gpu(used_by_others=40 * GIB, until_s=1000.0)
    with pytest.raises(ConfigError, match="max_model_len"):
        gpu.wait().until_it_fits(gpu.take(60 * GIB, lambda _: ConfigError("max_model_len")))  # type: ignore[arg-type]
    assert gpu.clock.now() == 0.0


def test_nothing_of_a_vain_try_is_kept_during_the_next() -> None:
    """A model that was half loaded would be memory in use, this time by ourselves."""
    left: list[weakref.ref[torch.Tensor]] = []

    def take() -> str:
        assert all(taken() is None for taken in left)
        weights = torch.zeros(8)
        left.append(weakref.ref(weights))
        if len(left) < 3:
            raise OutOfGpuMemory("no more")
        return "taken"

    clock = VirtualClock()
    wait = MemoryWait(lambda: 40 * GIB, lambda: None, clock, clock.advance)
    gc.disable()
    try:
        assert wait.until_it_fits(take) == "taken"
    finally:
        gc.enable()
    assert len(left) == 3


def test_it_is_longer_than_a_pool_of_the_dead_may_be_mapped_and_shorter_than_a_start_may_take() -> None:
    assert IDLE_S < LIMIT_S < BatonConfig().cluster.start_timeout_s


def test_on_a_cpu_nothing_is_waited_for() -> None:
    def take() -> str:
        raise OutOfGpuMemory("of what?")

    with pytest.raises(ConfigError):
        make_memory_wait(torch.device("cpu"), VirtualClock()).until_it_fits(take)
