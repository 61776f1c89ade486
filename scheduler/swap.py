"""SwapSpace: which host blocks hold which preempted request's KV; knows no device and copies nothing.

A step copies out before it copies in. So a host block that a step reads must not be written before the next
step.
"""

from collections.abc import Sequence

from scheduler.request import Request

Copies = list[tuple[int, int]]
"""(from, to) block ids of each copy."""


class SwapSpace:
    """A bounded pool of host blocks. Each is free, keeps a preempted request's KV, or is being read."""

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
        """Frees the host blocks that the last step read: this step may write them."""
        self._free += self._being_read
        self._being_read = []

    def swap_out(self, request: Request, block_ids: Sequence[int]) -> Copies:
        """Takes a host block for each of `block_ids`, and returns the copies. The caller has checked `num_free`."""
        assert not request.swapped_block_ids, f"{request.request_id} is swapped out already"
        request.swapped_block_ids = tuple([self._free.pop() for _ in block_ids])
        self.num_held += len(block_ids)
        return list(zip(block_ids, request.swapped_block_ids, strict=True))

    def swap_in(self, request: Request, block_ids: Sequence[int], num_hit_blocks: int) -> Copies:
        """Copies that bring the request's KV back into `block_ids`, except into the first `num_hit_blocks` of them.

        There may be fewer `block_ids` than swapped blocks: the last swapped blocks were for drafts that proved
        wrong.
        """
        held = self._take(request)
        self._being_read += held
        assert len(held) >= len(block_ids), f"{request.request_id} needs more than was swapped out"
        return list(zip(held, block_ids, strict=False))[num_hit_blocks:]

    def discard(self, request: Request) -> None:
        """Drops the request's KV; does nothing if no host block holds any."""
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
