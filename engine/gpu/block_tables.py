"""pack_tables: a step's block tables of all KV groups as one array; knows no kernel and no device.

The tables of a group with a window begin at the first block of each window. So the array hardly grows with
the number of such groups.

Shape suffixes as in engine/batch.py; X block ids of all groups, G groups.
"""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

from dataclasses import dataclass

import numpy as np

from baton.kv_groups import KVGroups
from engine.batch import StepBatch, StepLimits
from engine.request_table import IntArray


@dataclass(frozen=True, slots=True)
class PackedTables:
    """Block ids, ordered by group, and within a group by sequence."""

    block_ids_X: IntArray
    first_entries_GB: tuple[IntArray, ...]
    """For each sequence, the index at which the block of its first token is. If the table leaves out this
    block, the index at which it would be, perhaps below zero."""


def pack_tables(batch: StepBatch, groups: KVGroups, block_size: int, num_keys: int) -> PackedTables:
    """Packs the tables of a step. `num_keys`: how many keys kernels read at a time, beginning at multiples of this
    number."""
    columns_M = np.arange(batch.blocks[0].block_ids_BM.shape[1])
    is_used_BM = columns_M < batch.num_blocks_B[:, None]
    num_entries_B, first_entries_B = batch.num_blocks_B, np.cumsum(batch.num_blocks_B) - batch.num_blocks_B
    packed, first_entries, num_before = [], [], 0
    for group, blocks in enumerate(batch.blocks):
        if group == groups.num_full:  # the first with a window
            first_positions_B = batch.context_lens_B - batch.num_tokens_B
            first_keys_B = np.maximum(0, first_positions_B - groups.window + 1) // num_keys * num_keys
            left_out_B = first_keys_B // block_size
            is_used_BM = is_used_BM & (columns_M >= left_out_B[:, None])
            num_entries_B = batch.num_blocks_B - left_out_B
            first_entries_B = np.cumsum(num_entries_B) - batch.num_blocks_B
        packed.append(blocks.block_ids_BM[is_used_BM])
        first_entries.append(first_entries_B + num_before if num_before else first_entries_B)
        num_before += len(packed[-1])
    return PackedTables(packed[0] if len(packed) == 1 else np.concatenate(packed), tuple(first_entries))


def most_entries(limits: StepLimits, groups: KVGroups, block_size: int, num_keys: int) -> int:
    """The most block ids that `pack_tables` returns for a step."""
    num_sequences, max_blocks = limits.max_num_seqs, -(-limits.max_model_len // block_size)
    whole = num_sequences * max_blocks
    num_tokens = max(limits.max_num_batched_tokens, num_sequences)
    # n tokens from position p on need the blocks of the keys p - window + 1 (rounded down to a multiple of
    # `num_keys`) to p + n - 1.
    of_windows = num_sequences * ((groups.window + num_keys) // block_size + 3) + num_tokens // block_size
    return groups.num_full * whole + groups.num_windowed * min(whole, of_windows)
