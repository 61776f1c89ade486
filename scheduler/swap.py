"""SwapSpace: which host blocks hold which preempted request's KV; knows no device and copies nothing.

A step copies out before it copies in. So host blocks read by a step must not be written again before the next one.
"""

from collections.abc import Sequence

from baton.config import SchedulerConfig
from baton.errors import ConfigError
from scheduler.request import Request

Copies = list[tuple[int, int]]
"""(from, to) block ids."""


class SwapSpace:
    """A bounded pool of host blocks; every one is free, held by a preempted request, or being read by this step."""

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self._free = list(range(num_blocks))
        self._being_read: list[int] = []
        self.num_held = 0
        """Blocks that hold a preempted request's KV."""

    @property
    def num_free(self) -> int:
        """Blocks that a swap-out may write in this step."""
        return len(self._free)

    def begin_step(self) -> None:
        """Blocks read by the last step may be written by this one."""
        self._free += self._being_read
        self._being_read = []

    def swap_out(self, request: Request, block_ids: Sequence[int]) -> Copies:
        """Host blocks for all of `block_ids`; the caller has checked `num_free`."""
        assert not request.swapped_block_ids, f"{request.request_id} is swapped out already"
        request.swapped_block_ids = tuple([self._free.pop() for _ in block_ids])
        self.num_held += len(block_ids)
        return list(zip(block_ids, request.swapped_block_ids, strict=True))

    def swap_in(self, request: Request, block_ids: Sequence[int], num_hit_blocks: int) -> Copies:
        """Copies that bring the request's KV back into `block_ids`, of which the first `num_hit_blocks` have it. They
        may be fewer than were swapped out: wrong drafts that were under way then do not count.
        """
        held = self._take(request)
        self._being_read += held
        assert len(held) >= len(block_ids), f"{request.request_id} needs more than was swapped out"
        return list(zip(held, block_ids, strict=False))[num_hit_blocks:]

    def discard(self, request: Request) -> None:
        """Drops the request's KV; does nothing if it has none here."""
        self._free += self._take(request)

    def check_integrity(self) -> None:
        """Asserts that every host block has exactly one state."""
        known = {*self._free, *self._being_read}
        num_known = len(self._free) + len(self._being_read)
        assert len(known) == num_known, "a host block is free twice"
        assert num_known + self.num_held == self.num_total, "host blocks are lost"

    def _take(self, request: Request) -> tuple[int, ...]:
        held, request.swapped_block_ids = request.swapped_block_ids, ()
        self.num_held -= len(held)
        return held


def num_swap_blocks(config: SchedulerConfig) -> int:
    """Host blocks that the configuration asks for. ConfigError if it does not say how many."""
    if config.preemption == "recompute":
        return 0
    if config.num_swap_blocks is None:
        raise ConfigError(f"scheduler: preemption '{config.preemption}' needs num_swap_blocks")
    return config.num_swap_blocks
