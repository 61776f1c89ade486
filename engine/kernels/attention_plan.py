"""Cuts the attention of one launch into work items of similar cost; pure numpy, knows no device or tensor.

An item is a tile of a request's queries, with a range of the keys to which these queries attend. A context
that is too long for one program is split along its keys (flash-decoding:
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Each part then writes its own rows in a buffer of
partial results, and the plan lists the rows to merge.

Axis letters: B requests of the launch, I items, R merged rows, X tiles before they are split.
"""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

ITEM_FIELDS = 8
"""Number of an item's fields, which take 32 bytes, one sector of memory. The fields are: the request's first
entry in the block tables, the first query's row in the step, the number of queries, the first query's
position, the first key, the end of the keys, the first partial row (DIRECT: the result is final), and the
first query's merge (if there are partial rows)."""
MERGE_FIELDS = 4
"""Number of a merge's fields: output row, first partial row, number of parts, and rows from one part to the
next."""
DIRECT = -1

MIN_SPLIT_KEYS = 256
"""A part has at least this many keys: with fewer, most of an item's cost would be fixed cost."""
MAX_WAVES = 4
"""The most items per program that splitting aims at. More items balance better, but each item has a fixed
cost."""
ITEM_COST_KEYS = 96
"""Fixed cost of an item, in keys: about 2 us of latency, and a program takes about 1 us for 64 keys."""
MERGE_COST_KEYS = 128
"""Cost of the merging launch, in keys."""


@dataclass(frozen=True, slots=True)
class TileGrid:
    """How a launch cuts its work into tiles, and divides it among programs."""

    queries: int
    """Queries of one request in a tile."""
    keys: int
    """Keys processed at a time. Items begin at multiples of this number."""
    num_programs: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of one launch, longest items first."""

    items_IF: Int32s
    merges_RF: Int32s
    """Merges; those of one tile's queries are consecutive."""
    num_partial_rows: int

    def over_tables(self, distance: int) -> "AttentionPlan":
        """This plan's work, with tables that begin `distance` entries later."""
        items_IF = self.items_IF.copy()
        items_IF[:, 0] += distance
        return replace(self, items_IF=items_IF)


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Upper bounds of every plan for a given number of requests and tokens."""

    num_items: int
    num_merges: int
    num_partial_rows: int


def plan_attention(
    table_rows_B: Int64s,
    first_rows_B: Int64s,
    num_queries_B: Int64s,
    context_lengths_B: Int64s,
    grid: TileGrid,
    window: int | None = None,
) -> AttentionPlan:
    """Plans requests that have `num_queries` consecutive rows of the step from `first_rows` on.

    Context lengths include the step's own tokens, so the last query is at the last position. A query at position p
    attends to the keys up to p. With a window, it attends only to the last `window` of these keys, including its own.
    The items together cover each pair of a query and one of its keys exactly once.
    """
    assert window is None or window > 0, f"a window of {window} keys"
    assert bool(np.all(num_queries_B > 0))
    assert bool(np.all(context_lengths_B >= num_queries_B))
    tiles = _tiles(table_rows_B, first_rows_B, num_queries_B, context_lengths_B, grid, window)
    num_parts_X = _choose_parts(tiles.num_steps_X, grid)
    return _plan(tiles, num_parts_X, grid)


def plan_bounds(max_requests: int, max_tokens: int, grid: TileGrid) -> PlanBounds:
    """Bounds for launches of at most this many requests and tokens, to allocate buffers once."""
    num_requests = min(max_requests, max_tokens)
    num_tiles = num_requests + (max_tokens - num_requests) // grid.queries
    # A split tile, and each of its parts except the last one, has more than 1 / (programs x waves) of all heads' steps.
    # So fewer than `num_shares` tiles are split, into fewer than 2 x `num_shares` parts. This adds at most
    # `num_shares` items.
    num_shares = MAX_WAVES * grid.num_programs // grid.num_kv_heads
    rows_per_tile = min(grid.queries, max_tokens)
    return PlanBounds(
        num_items=num_tiles + num_shares,
        num_merges=min(max_tokens, num_shares * rows_per_tile),
        num_partial_rows=min(max_tokens + num_shares * rows_per_tile, 2 * num_shares * rows_per_tile),
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    table_rows_X: Int64s
    first_rows_X: Int64s
    num_queries_X: Int64s
    positions_X: Int64s
    """Positions of the first queries."""
    first_keys_X: Int64s
    end_keys_X: Int64s
    num_steps_X: Int64s
    """How many times a tile processes `TileGrid.keys` keys."""


def _tiles(
    table_rows_B: Int64s,
    first_rows_B: Int64s,
    num_queries_B: Int64s,
    context_lengths_B: Int64s,
    grid: TileGrid,
    window: int | None,
) -> _Tiles:
    num_tiles_B = -(-num_queries_B // grid.queries)
    requests_X, tile_X = _repeat(num_tiles_B)
    offsets_X = tile_X * grid.queries
    num_queries_X = np.minimum(grid.queries, num_queries_B[requests_X] - offsets_X)
    positions_X = context_lengths_B[requests_X] - num_queries_B[requests_X] + offsets_X
    if window is None:
        first_keys_X = np.zeros_like(positions_X)
    else:
        first_keys_X = np.maximum(0, positions_X - window + 1) // grid.keys * grid.keys
    end_keys_X = positions_X + num_queries_X
    return _Tiles(
        table_rows_X=table_rows_B[requests_X],
        first_rows_X=first_rows_B[requests_X] + offsets_X,
        num_queries_X=num_queries_X,
        positions_X=positions_X,
        first_keys_X=first_keys_X,
        end_keys_X=end_keys_X,
        num_steps_X=-(-(end_keys_X - first_keys_X) // grid.keys),
    )


def _choose_parts(num_steps_X: Int64s, grid: TileGrid) -> Int64s:
    """For each tile, the number of parts with which the last program ends soonest."""
    best_X = np.ones_like(num_steps_X)
    if num_steps_X.size == 0:
        return best_X
    best_cost, mean_cost = _cost(num_steps_X, best_X, grid)
    total_steps = int(num_steps_X.sum()) * grid.num_kv_heads
    last_part_steps = int(num_steps_X.max())
    for waves in range(1, MAX_WAVES + 1):
        if best_cost <= 1.05 * mean_cost:
            break  # nothing to gain
        part_steps = max(-(-MIN_SPLIT_KEYS // grid.keys), -(-total_steps // (grid.num_programs * waves)))
        if part_steps >= last_part_steps:
            continue  # no tile would be split, or the parts would be the same as before
        last_part_steps = part_steps
        num_parts_X = -(-num_steps_X // part_steps)
        cost, _ = _cost(num_steps_X, num_parts_X, grid)
        if cost + MERGE_COST_KEYS < best_cost:
            best_cost, best_X = cost + MERGE_COST_KEYS, num_parts_X
    return best_X


def _cost(num_steps_X: Int64s, num_parts_X: Int64s, grid: TileGrid) -> tuple[float, float]:
    """Costs of the busiest and of the average program, in keys; programs take items in the order of the kernel."""
    tiles_I, _ = _repeat(num_parts_X)
    cost_I = -(-num_steps_X // num_parts_X)[tiles_I] * grid.keys + ITEM_COST_KEYS
    cost_U = np.repeat(np.sort(cost_I)[::-1], grid.num_kv_heads)
    num_waves = -(-cost_U.size // grid.num_programs)
    cost_WP = np.zeros((num_waves, grid.num_programs), np.int64)
    cost_WP.reshape(-1)[: cost_U.size] = cost_U
    cost_WP[1::2] = cost_WP[1::2, ::-1]
    return float(cost_WP.sum(0).max()), float(cost_U.sum() / grid.num_programs)


def _plan(tiles: _Tiles, num_parts_X: Int64s, grid: TileGrid) -> AttentionPlan:
    tiles_I, part_I = _repeat(num_parts_X)
    steps_I, parts_I = tiles.num_steps_X[tiles_I], num_parts_X[tiles_I]
    is_split_X = num_parts_X > 1
    partial_rows_X = np.where(is_split_X, num_parts_X * tiles.num_queries_X, 0)
    first_partial_X = np.cumsum(partial_rows_X) - partial_rows_X
    items_IF = np.zeros((tiles_I.size, ITEM_FIELDS), np.int32)
    items_IF[:, 0] = tiles.table_rows_X[tiles_I]
    items_IF[:, 1] = tiles.first_rows_X[tiles_I]
    items_IF[:, 2] = tiles.num_queries_X[tiles_I]
    items_IF[:, 3] = tiles.positions_X[tiles_I]
    first_keys_I = tiles.first_keys_X[tiles_I]
    items_IF[:, 4] = first_keys_I + part_I * steps_I // parts_I * grid.keys
    end_keys_I = first_keys_I + (part_I + 1) * steps_I // parts_I * grid.keys
    items_IF[:, 5] = np.minimum(end_keys_I, tiles.end_keys_X[tiles_I])
    partial_I = first_partial_X[tiles_I] + part_I * tiles.num_queries_X[tiles_I]
    items_IF[:, 6] = np.where(is_split_X[tiles_I], partial_I, DIRECT)
    merged_rows_X = np.where(is_split_X, tiles.num_queries_X, 0)
    items_IF[:, 7] = (np.cumsum(merged_rows_X) - merged_rows_X)[tiles_I]
    longest_first_I = np.argsort(items_IF[:, 4] - items_IF[:, 5], kind="stable")
    return AttentionPlan(
        items_IF=items_IF[longest_first_I],
        merges_RF=_merges(tiles, num_parts_X, first_partial_X),
        num_partial_rows=int(partial_rows_X.sum()),
    )


def _merges(tiles: _Tiles, num_parts_X: Int64s, first_partial_X: Int64s) -> Int32s:
    tiles_R, query_R = _repeat(np.where(num_parts_X > 1, tiles.num_queries_X, 0))
    merges_RF = np.empty((tiles_R.size, MERGE_FIELDS), np.int32)
    merges_RF[:, 0] = tiles.first_rows_X[tiles_R] + query_R
    merges_RF[:, 1] = first_partial_X[tiles_R] + query_R
    merges_RF[:, 2] = num_parts_X[tiles_R]
    merges_RF[:, 3] = tiles.num_queries_X[tiles_R]
    return merges_RF


def _repeat(counts_X: Int64s) -> tuple[Int64s, Int64s]:
    """Index i repeated `counts[i]` times, and for each copy its number: 0, 1 ... counts[i] - 1."""
    indices = np.repeat(np.arange(counts_X.size), counts_X)
    firsts_X = np.cumsum(counts_X) - counts_X
    return indices, np.arange(indices.size) - firsts_X[indices]
