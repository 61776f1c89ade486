"""Prefixes that can be hit in all KV groups; knows no request.

A full-attention group needs every row of a prefix. A windowed group needs only those that the next token's window
reaches, so rows before them may be missing. The search is that of vLLM's hybrid coordinator (0.13).
"""

from collections.abc import Callable, Sequence
from itertools import chain

from baton.kv_groups import KVGroups
from scheduler.block_pool import Block, BlockPool


def cached_rows(
    pool: BlockPool,
    block_hashes: Sequence[bytes],
    groups: KVGroups,
    block_size: int,
    num_before_window: int | None = None,
) -> list[Block]:
    """The blocks, row by row, of the longest prefix from which every group can continue.
    Null blocks replace blocks that are not needed.

    `num_before_window`: set if another worker sends the tokens after the prefix. This many rows will then be before
    the window, so a windowed group may lack them. None: this worker computes these tokens.
    """
    columns = [pool.cached_prefix(block_hashes, group) for group in range(groups.num_full)]
    num_rows = min(map(len, columns), default=len(block_hashes))
    windowed = range(groups.num_full, groups.num_groups)

    def is_cached(row: int) -> bool:
        return all(pool.is_cached(block_hashes[row], group) for group in windowed)

    if num_before_window is None:
        num_rows = _end_of_last_run(is_cached, num_rows, groups.num_rows_of_window(block_size))
        num_before_window = groups.num_rows_before_window(num_rows * block_size, block_size)
    else:
        num_rows = next((row for row in range(num_before_window, num_rows) if not is_cached(row)), num_rows)
    needed = block_hashes[num_before_window:num_rows]
    columns += [[pool.null] * num_before_window + pool.cached_prefix(needed, group) for group in windowed]
    return list(chain.from_iterable(zip(*(column[:num_rows] for column in columns), strict=True)))


def _end_of_last_run(is_cached: Callable[[int], bool], num_rows: int, num_needed: int) -> int:
    """The end of the last run of `num_needed` cached rows. Without such a run, the number of cached rows from row 0
    on."""
    num_in_run = 0
    for row in range(num_rows - 1, -1, -1):
        num_in_run = num_in_run + 1 if is_cached(row) else 0
        if num_in_run == num_needed:
            return row + num_needed
    return num_in_run
