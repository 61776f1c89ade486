"""Block tables of all KV groups in one array: attention finds the block of every key that it reads."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_groups import ONE_GROUP, KVGroups
from engine.batch import StepBatch, StepLimits
from engine.gpu.block_tables import most_entries, pack_tables
from engine.group_blocks import GroupBlocks

SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), max_size=5)
"""Tokens in the step, and tokens before them."""
GROUPS = st.builds(KVGroups, st.integers(0, 2), st.integers(1, 3), st.integers(2, 90)) | st.just(ONE_GROUP)


def batch_of(sequences: list[tuple[int, int]], groups: KVGroups, block_size: int) -> StepBatch:
    """Every block of every group has an id of its own."""
    num_tokens_B = np.array([num_tokens for num_tokens, _ in sequences], np.int64)
    context_lens_B = np.array([sum(each) for each in sequences], np.int64)
    num_blocks_B = -(-context_lens_B // block_size)
    shape = (groups.num_groups, len(sequences), int(num_blocks_B.max(initial=0)))
    block_ids_GBM = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    none = np.empty(0, np.int64)
    return StepBatch(
        input_ids_T=none,
        sources_T=none,
        positions_T=none,
        num_decodes=0,
        starts_B=np.cumsum(num_tokens_B) - num_tokens_B,
        num_tokens_B=num_tokens_B,
        context_lens_B=context_lens_B,
        num_blocks_B=num_blocks_B,
        blocks=tuple(GroupBlocks(none, block_ids_BM, ()) for block_ids_BM in block_ids_GBM),
        sampling_rows_R=none,
        sampling_requests=(),
    )


@given(SEQUENCES, GROUPS, st.sampled_from([4, 16, 64]), st.sampled_from([16, 64]))
def test_every_block_that_attention_reads_is_where_its_sequence_says(
    sequences: list[tuple[int, int]], groups: KVGroups, block_size: int, num_keys: int
) -> None:
    batch = batch_of(sequences, groups, block_size)
    tables = pack_tables(batch, groups, block_size, num_keys)
    for group, (entries_B, blocks) in enumerate(zip(tables.first_entries_GB, batch.blocks, strict=True)):
        for i, (num_tokens, num_before) in enumerate(sequences):
            window = groups.window if group >= groups.num_full else num_before + 1
            first_read = max(0, num_before - window + 1) // num_keys * num_keys
            for key in range(first_read, num_before + num_tokens):
                entry = entries_B[i] + key // block_size
                assert 0 <= entry < len(tables.block_ids_X)
                assert tables.block_ids_X[entry] == blocks.block_ids_BM[i, key // block_size]
    limits = StepLimits(
        max_num_seqs=max(1, len(sequences)),
        max_num_batched_tokens=max(1, sum(num_tokens for num_tokens, _ in sequences)),
        max_model_len=max([1, *map(sum, sequences)]),
    )
    assert len(tables.block_ids_X) <= most_entries(limits, groups, block_size, num_keys)


@given(SEQUENCES)
def test_the_tables_of_one_group_follow_one_another(sequences: list[tuple[int, int]]) -> None:
    batch = batch_of(sequences, ONE_GROUP, 16)
    tables = pack_tables(batch, ONE_GROUP, 16, 64)
    rows = zip(batch.blocks[0].block_ids_BM, batch.num_blocks_B, strict=True)
    assert tables.block_ids_X.tolist() == [block for ids_M, count in rows for block in ids_M[:count]]


@given(st.integers(1_000, 100_000), st.integers(1, 5))
def test_windows_add_hardly_any_entries(context_len: int, num_windowed: int) -> None:
    groups = KVGroups(1, num_windowed, 128)
    tables = pack_tables(batch_of([(1, context_len)], groups, 16), groups, 16, 64)
    of_window = (128 + 64) // 16 + 2
    assert len(tables.block_ids_X) <= -(-(context_len + 1) // 16) + num_windowed * of_window
