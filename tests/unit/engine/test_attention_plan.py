"""How attention is cut into items of work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.attention_plan import DIRECT, AttentionPlan, TileGrid, plan_attention, plan_bounds

REQUESTS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 700)), min_size=1, max_size=6)
"""Queries, and tokens before them."""
GRIDS = st.builds(
    TileGrid,
    queries=st.integers(1, 32),
    keys=st.sampled_from([16, 64]),
    num_programs=st.integers(1, 300),
    num_kv_heads=st.integers(1, 8),
)


@given(REQUESTS, GRIDS, st.none() | st.integers(1, 400))
def test_every_query_meets_every_key_it_sees_once(
    requests: list[tuple[int, int]], grid: TileGrid, window: int | None
) -> None:
    plan = _plan(requests, grid, window)
    first_rows = np.cumsum([0] + [queries for queries, _ in requests])
    seen = [np.zeros((queries, earlier + queries), np.int64) for queries, earlier in requests]
    for table_row, first_row, num_queries, position, first_key, end_key, _, _ in plan.items_IF.tolist():
        rows = first_row - first_rows[table_row] + np.arange(num_queries)
        assert position == requests[table_row][1] + rows[0]
        assert 0 < num_queries <= grid.queries
        assert first_key < end_key
        assert first_key % grid.keys == 0
        seen[table_row][rows, first_key:end_key] += 1
        # The kernel does not mask the end of an item. After the end come keys that no query sees, or another item,
        # which begins at a whole step.
        assert end_key % grid.keys == 0 or end_key == position + num_queries
    for (queries, earlier), seen_QK in zip(requests, seen, strict=True):
        positions_Q1, keys_K = np.arange(earlier, earlier + queries)[:, None], np.arange(earlier + queries)
        visible_QK = keys_K <= positions_Q1
        if window is not None:
            visible_QK &= keys_K > positions_Q1 - window
        assert (seen_QK[visible_QK] == 1).all()


@given(REQUESTS, GRIDS, st.none() | st.integers(1, 400))
def test_each_split_row_is_merged_of_its_parts(
    requests: list[tuple[int, int]], grid: TileGrid, window: int | None
) -> None:
    plan = _plan(requests, grid, window)
    written: dict[int, int] = {}
    direct = []
    for _, first_row, num_queries, _, _, _, partial_row, merge in plan.items_IF.tolist():
        for query in range(num_queries):
            if partial_row == DIRECT:
                direct.append(first_row + query)
            else:
                assert partial_row + query not in written
                out_row, first_partial, _, stride = plan.merges_RF[merge + query].tolist()
                assert out_row == first_row + query
                assert (partial_row + query - first_partial) % stride == 0
                written[partial_row + query] = first_row + query
    merged = []
    for out_row, first_partial, num_parts, stride in plan.merges_RF.tolist():
        merged.append(out_row)
        assert num_parts > 1
        for part in range(num_parts):
            assert written.pop(first_partial + part * stride) == out_row
    assert not written
    assert sorted(direct + merged) == list(range(sum(queries for queries, _ in requests)))


@given(REQUESTS, GRIDS, st.none() | st.integers(1, 400))
def test_no_plan_is_larger_than_its_bounds(
    requests: list[tuple[int, int]], grid: TileGrid, window: int | None
) -> None:
    plan = _plan(requests, grid, window)
    bounds = plan_bounds(len(requests), sum(queries for queries, _ in requests), grid)
    assert len(plan.items_IF) <= bounds.num_items
    assert len(plan.merges_RF) <= bounds.num_merges
    assert plan.num_partial_rows <= bounds.num_partial_rows


def test_longest_items_come_first() -> None:
    plan = _plan([(1, 99), (1, 499), (1, 299)], TileGrid(queries=4, keys=64, num_programs=1, num_kv_heads=1))
    lengths = plan.items_IF[:, 5] - plan.items_IF[:, 4]
    assert lengths.tolist() == [500, 300, 100]


H200 = TileGrid(queries=4, keys=64, num_programs=264, num_kv_heads=8)


@pytest.mark.parametrize(
    ("num_requests", "context", "parts"),
    [
        (1, 131072, 33),  # one long context keeps every program busy
        (264, 4096, 1),  # whole waves need no splitting
        (40, 300, 1),  # too short to be worth it
    ],
)
def test_splits_as_far_as_it_pays(num_requests: int, context: int, parts: int) -> None:
    plan = _plan([(1, context - 1)] * num_requests, H200)
    assert len(plan.items_IF) == num_requests * parts


def test_a_context_longer_than_the_others_does_not_hold_them_up() -> None:
    plan = _plan([(1, 131071)] + [(1, 999)] * 63, H200)
    lengths = plan.items_IF[:, 5] - plan.items_IF[:, 4]
    mean_load = lengths.sum() * H200.num_kv_heads / H200.num_programs
    assert lengths.max() <= mean_load + H200.keys


def test_a_window_cuts_what_no_query_sees() -> None:
    plan = _plan([(1, 9999)], TileGrid(queries=4, keys=64, num_programs=1, num_kv_heads=1), window=100)
    assert plan.items_IF[:, 4:6].tolist() == [[9900 // 64 * 64, 10000]]


def test_no_requests_are_no_work() -> None:
    plan = _plan([], H200)
    assert len(plan.items_IF) == len(plan.merges_RF) == plan.num_partial_rows == 0


def _plan(requests: list[tuple[int, int]], grid: TileGrid, window: int | None = None) -> AttentionPlan:
    queries_B = np.array([queries for queries, _ in requests], np.int64)
    lengths_B = np.array([queries + earlier for queries, earlier in requests], np.int64)
    table_rows_B = np.arange(len(requests))
    return plan_attention(table_rows_B, np.cumsum(queries_B) - queries_B, queries_B, lengths_B, grid, window)
