"""MemoryWait: waits for GPU memory of other processes, such as a killed worker that has not ended yet."""

import gc
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from baton.clock import Clock
from baton.errors import ConfigError
from engine.gpu.memory import GIB, OutOfGpuMemory

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMIT_S = 60.0
"""Limit of all waits together. It is longer than a consumer keeps a dead producer's pool open if the system cannot
report the producer's end."""
RETRY_S = 1.0
UNOWNED_BYTES = 2 * GIB
"""Up to this much memory is used by the driver, and by this process outside of tensors. It will not be
released."""


class MemoryWait:
    """Retries calls that found too little memory, as long as other processes use memory.

    A start of a worker has one MemoryWait, and its limit applies to all calls together.
    """

    def __init__(
        self,
        used_by_others: Callable[[], int],
        release: Callable[[], None],
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`used_by_others` returns the bytes in use outside of this process's tensors. `release` frees the memory that
        this process caches."""
        self._used_by_others = used_by_others
        self._release = release
        self._clock = clock
        self._sleep = sleep
        self._began_at: float | None = None

    def until_it_fits(self, allocate: Callable[[], T]) -> T:
        """Returns the result of `allocate`, which may be called many times and leaves nothing behind when it raises.

        ConfigError or torch.OutOfMemoryError if memory does not suffice: at once if no other process holds any, else
        at the limit.
        """
        while True:
            try:
                return allocate()
            except (OutOfGpuMemory, torch.OutOfMemoryError) as error:
                if not self._is_worth_waiting():
                    if isinstance(error, OutOfGpuMemory):
                        raise ConfigError(str(error)) from error
                    raise
            # Here the error is freed, and with it the stack frames that kept partial allocations.
            self._sleep(RETRY_S)
            self._release()

    def _is_worth_waiting(self) -> bool:
        used, now = self._used_by_others(), self._clock.now()
        if used <= UNOWNED_BYTES:
            return False
        if self._began_at is None:
            self._began_at = now
            logger.warning(
                "waiting up to %g s: %.1f GiB of the GPU are in use by other processes", LIMIT_S, used / GIB
            )
        return now < self._began_at + LIMIT_S


def make_memory_wait(device: torch.device, clock: Clock) -> MemoryWait:
    """The MemoryWait of this device. On a CPU, it never waits."""
    if device.type == "cpu":
        return MemoryWait(lambda: 0, lambda: None, clock)

    def used_by_others() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)

    def release() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    return MemoryWait(used_by_others, release, clock)
