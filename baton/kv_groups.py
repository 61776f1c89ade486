"""KVGroups: layers with equal needs share a block table, and all tables share one pool; pure arithmetic.

A block holds `block_size` tokens' KV of one group's layers. All groups have equally many layers, so any block of the
pool serves any group. The tables of a request are one list of *rows*: row r has a block of each group for the tokens
from r * block_size on, groups with full attention first.

    block_ids    row 0            row 1            row 2                 2 groups; 0 is the null block
                 [full, windowed, full, windowed,  full, windowed]
    after a while [5,   0,        8,    0,         9,    12]             rows 0 and 1 have left the window
"""

from dataclasses import dataclass

from baton.errors import ConfigError

NULL_BLOCK_ID = 0
"""The null block. No request owns it. It fills a table where a group has no block, or none any more. Only the device
check writes to it (worker/device_check.py), so it holds finite numbers."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """`num_full` groups whose layers attend to all tokens, and `num_windowed` that attend to the last `window`."""

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0
    """Tokens that a token attends to, itself included; 0 if no group has a window."""

    def __post_init__(self) -> None:
        if min(self.num_full, self.num_windowed) < 0 or self.num_full + self.num_windowed == 0:
            raise ConfigError(f"kv groups: got {self.num_full} full and {self.num_windowed} windowed groups")
        if self.window < 2 if self.num_windowed else self.window:
            raise ConfigError(
                f"kv groups: a window of {self.window} tokens does not suit {self.num_windowed} windowed groups; the "
                "window must be at least 2 with windowed groups, and 0 without them"
            )

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    def num_rows_before_window(self, num_computed_tokens: int, block_size: int) -> int:
        """The number of rows that the windows of later tokens do not reach, once `num_computed_tokens` tokens are
        computed; 0 without windows."""
        if not self.num_windowed:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def leaves_at(self, row: int, block_size: int) -> int:
        """The number of computed tokens at which the row has left the window."""
        return (row + 1) * block_size + self.window - 1

    def num_rows_of_window(self, block_size: int) -> int:
        """Full rows that the next token's window may reach."""
        return -(-(self.window - 1) // block_size)

    def needed_entries(self, num_tokens: int, block_size: int) -> list[int]:
        """Which blocks of the first `num_tokens` are needed by later tokens, as indices in the request's block ids."""
        num_rows, num_groups = -(-num_tokens // block_size), self.num_groups
        num_before_window = self.num_rows_before_window(num_tokens, block_size)
        return [
            row * num_groups + group
            for row in range(num_rows)
            for group in range(num_groups if row >= num_before_window else self.num_full)
        ]

    def num_held_blocks(self, num_tokens: int, block_size: int) -> int:
        """The number of blocks that a request holds for `num_tokens` tokens, if all but the last of them are
        computed."""
        num_before_window = self.num_rows_before_window(num_tokens - 1, block_size)
        return -(-num_tokens // block_size) * self.num_groups - num_before_window * self.num_windowed

    def num_blocks_for_one(self, num_tokens: int, block_size: int, most_per_step: int) -> int:
        """The number of blocks that a request of `num_tokens` tokens needs if a step computes up to `most_per_step` of
        them."""
        num_rows = -(-num_tokens // block_size)
        of_windows = min(num_rows, self._num_rows_in_step(block_size, most_per_step))
        return self.num_full * num_rows + self.num_windowed * of_windows

    def most_rows(self, num_blocks: int, block_size: int, most_per_step: int) -> int | None:
        """The most rows that one request can have with `num_blocks` blocks.

        A step computes up to `most_per_step` tokens of the request. None: the number of blocks sets no limit,
        because all groups have a window.
        """
        num_rows = num_blocks // self.num_groups
        if not self.num_windowed:
            return num_rows
        num_rows_in_step = self._num_rows_in_step(block_size, most_per_step)
        if num_rows_in_step > num_rows:
            return num_rows
        if not self.num_full:
            return None
        return (num_blocks - self.num_windowed * num_rows_in_step) // self.num_full

    def _num_rows_in_step(self, block_size: int, most_per_step: int) -> int:
        """The most rows that a windowed group has during a step.

        A step's tokens get their rows before the rows that leave the window are given back.
        """
        return -(-(self.window - 1 + most_per_step) // block_size) + 1


ONE_GROUP = KVGroups()
"""Full attention in all layers."""
