"""GroupBlocks: the blocks that store a step's KV of one KV group; knows no request and no model.

Shape suffixes as in engine/batch.py.
"""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

from dataclasses import dataclass

import numpy as np

from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from engine.request_table import IntArray, RequestTable


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Where one KV group stores a step's KV."""

    slots_T: IntArray
    """Where each token's KV is stored: block id x block size + offset."""
    block_ids_BM: IntArray
    """The blocks with the KV of each context, padded with the null block."""
    new_tails: tuple[tuple[int, int], ...]
    """(block, offset): from this offset on, a request's last block may contain garbage, which must be zeroed
    before attention. Kernels read whole blocks, and the block's former owner or a peer may have left a NaN.
    Masking is not enough, since 0 x NaN is NaN."""


def group_blocks(
    table: RequestTable,
    groups: KVGroups,
    block_size: int,
    rows_B: IntArray,
    owners_T: IntArray,
    positions_T: IntArray,
    ends_B: IntArray,
) -> tuple[GroupBlocks, ...]:
    """The GroupBlocks of each KV group.

    `owners_T`: the sequence of each token. `ends_B`: the position after each sequence's last token. A request's block
    ids in `table` contain one block of each group in turn. Blocks that have left the window may belong to other
    requests by now, so padding replaces them.
    """
    num_groups = groups.num_groups
    num_blocks_B = -(-ends_B // block_size)
    is_new_B = _are_last_blocks_new(table, rows_B, (ends_B - 1) // block_size * num_groups)
    places_M = np.arange(num_blocks_B.max())
    is_padding_BM = places_M >= num_blocks_B[:, None]
    found = []
    for group in range(num_groups):
        block_ids_BM = table.block_ids_SM[rows_B, group : len(places_M) * num_groups : num_groups]
        block_ids_BM[is_padding_BM] = NULL_BLOCK_ID
        if group >= groups.num_full:
            seen_from_B = np.maximum(0, table.num_computed_tokens_S[rows_B] - groups.window + 1)
            block_ids_BM[places_M < (seen_from_B // block_size)[:, None]] = NULL_BLOCK_ID
        block_ids_T = table.block_ids_SM[rows_B[owners_T], positions_T // block_size * num_groups + group]
        new_tails = [
            (int(block_ids_BM[i, num_blocks_B[i] - 1]), int(ends_B[i] % block_size))
            for i in np.flatnonzero(is_new_B & (ends_B % block_size > 0))
        ]
        found.append(
            GroupBlocks(block_ids_T * block_size + positions_T % block_size, block_ids_BM, tuple(new_tails))
        )
    return tuple(found)


def _are_last_blocks_new(table: RequestTable, rows_B: IntArray, entries_B: IntArray) -> IntArray:
    """Whether each sequence's last block is a different block than at the previous call.

    `entries_B`: the index of this block in the first group. A request gets new blocks of all groups at the
    same time, so the first group is enough."""
    last_blocks_B = table.block_ids_SM[rows_B, entries_B]
    is_new_B: IntArray = table.cleared_blocks_S[rows_B] != last_blocks_B
    table.cleared_blocks_S[rows_B] = last_blocks_B
    return is_new_B
