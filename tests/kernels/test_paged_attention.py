"""Attention over the paged cache: its plan, its kernel and the merge of its parts, against float64."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.kernels.attention_plan import ITEM_FIELDS, MERGE_FIELDS
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning, decode_tuning, prefill_tuning
from engine.kernels.merge_partials import merge_partials
from engine.kernels.paged_attention import LayerKV, Merging, Partials, Softmax, paged_attention
from tests.kernels.attention_steps import PLAIN, Case, PagedStep


def _launch(
    tuning_of: Callable[[AttentionShape], AttentionTuning],
    *,
    head_dim: int = 128,
    num_query_heads: int = 32,
    num_kv_heads: int = 8,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    cap: float | None = None,
    merges: bool | None = None,
    has_sinks: bool = False,
) -> Callable[[], None]:
    """A launch with the strides of a model whose queries stay within the output of the qkv projection."""
    kv_dtype = kv_dtype or dtype
    merges = tuning_of is decode_tuning if merges is None else merges
    shape = AttentionShape(
        num_query_heads, num_kv_heads, head_dim, block_size, dtype.itemsize, kv_dtype.itemsize
    )

    def launch() -> None:
        width = (num_query_heads + 2 * num_kv_heads) * head_dim
        q_TQD = torch.empty(1, width, dtype=dtype)[:, : num_query_heads * head_dim].unflatten(
            1, (-1, head_dim)
        )
        blocks_NLKHSD = torch.empty(2, 2, 2, num_kv_heads, block_size, head_dim, dtype=kv_dtype)
        paged_attention(
            q_TQD,
            LayerKV(blocks_NLKHSD[:, 1], shape),
            torch.zeros(1, 64, dtype=torch.int32),
            torch.zeros(1, ITEM_FIELDS, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            Partials.empty(1, shape, torch.device("cpu")),
            torch.empty(1, num_query_heads, head_dim, dtype=dtype),
            Softmax(head_dim**-0.5, window, cap),
            tuning_of(shape),
            132,
            _merging(1, num_kv_heads, torch.device("cpu")) if merges else None,
            torch.empty(num_query_heads) if has_sinks else None,
        )

    return launch


def _merging(num_merges: int, num_kv_heads: int, device: torch.device) -> Merging:
    merges_RF = torch.zeros(num_merges, MERGE_FIELDS, dtype=torch.int32, device=device)
    return Merging(merges_RF, torch.zeros(num_merges, num_kv_heads, dtype=torch.int32, device=device))


def _launch_merge() -> None:
    """The launch of Llama-3.1-8B and Qwen3-8B."""
    merge_partials(
        torch.empty(1, 32, 128),
        torch.empty(1, 32),
        torch.zeros(1, MERGE_FIELDS, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.empty(1, 32, 128, dtype=torch.bfloat16),
        264,
    )


# Llama-3.1-8B and Qwen3-8B have the same attention: 32 query heads, 8 kv heads of 128.
LAUNCHES = {
    "decode": _launch(decode_tuning),
    "decode, merged by another launch": _launch(decode_tuning, merges=False),
    "decode, groups of 8": _launch(decode_tuning, num_query_heads=64),
    "decode, blocks of 128": _launch(decode_tuning, block_size=128),
    "decode, blocks of 16": _launch(decode_tuning, block_size=16),
    "decode, float8 cache": _launch(decode_tuning, kv_dtype=torch.float8_e4m3fn),
    "decode, heads of 64": _launch(decode_tuning, head_dim=64),
    "decode, heads of 256": _launch(decode_tuning, head_dim=256),
    "decode, heads of 96": _launch(decode_tuning, head_dim=96),
    "decode, capped": _launch(decode_tuning, head_dim=256, cap=50.0),
    "decode, sinks": _launch(decode_tuning, num_query_heads=64, head_dim=64, has_sinks=True),
    "decode, float32": _launch(decode_tuning, dtype=torch.float32, head_dim=64, block_size=16),
    "decode, float32, heads of 64 by the copy engine": _launch(
        decode_tuning, dtype=torch.float32, head_dim=64
    ),
    "decode, float32, heads of 128 by the copy engine": _launch(decode_tuning, dtype=torch.float32),
    "prefill": _launch(prefill_tuning),
    "prefill, blocks of 128": _launch(prefill_tuning, block_size=128),
    "prefill, blocks of 16": _launch(prefill_tuning, block_size=16),
    "prefill, float8 cache": _launch(prefill_tuning, kv_dtype=torch.float8_e4m3fn),
    "prefill, window": _launch(prefill_tuning, window=4096),
    "prefill, heads of 64": _launch(prefill_tuning, head_dim=64),
    "prefill, heads of 256": _launch(prefill_tuning, head_dim=256),
    "prefill, heads of 96": _launch(prefill_tuning, head_dim=96),
    "prefill, capped": _launch(prefill_tuning, head_dim=256, cap=50.0),
    "prefill, window, sinks": _launch(
        prefill_tuning, num_query_heads=64, head_dim=64, window=128, has_sinks=True
    ),
    "prefill, float32": _launch(prefill_tuning, dtype=torch.float32, head_dim=64, block_size=16),
    "prefill, float32, heads of 64 by the copy engine": _launch(
        prefill_tuning, dtype=torch.float32, head_dim=64
    ),
    "prefill, float32, heads of 128 by the copy engine": _launch(prefill_tuning, dtype=torch.float32),
    "merge": _launch_merge,
}
RARE = [
    name
    for name in LAUNCHES
    if any(part in name for part in ("blocks of", "heads of", "groups of", "copy engine", "another launch"))
    or name in ("decode, float32", "decode, sinks", "decode, float8 cache")
    or name in ("prefill, capped", "prefill, window", "prefill, float32")
]
"""Heads of 64 are also those with sinks, in groups of 8; heads of 256 are also capped. Sinks also have a window.
Decodes differ from prefills only in their tiles; those of capped prefills take longest to compile. Another launch also
merges prefills."""


SMALL = AttentionTuning(block_m=16, block_n=32, num_warps=4, num_stages=2, programs_per_multiprocessor=1)
SHAPE = AttentionShape(4, 2, 64, 32, 4, 4)
GATHERED = replace(SHAPE, block_size=16)

CASES = {
    "decode": Case([1, 1, 1], [1, 33, 64], SHAPE, SMALL, PLAIN),
    "decode through pointers": Case([1, 1, 1], [1, 33, 64], GATHERED, SMALL, PLAIN),
    "long contexts are split": Case([1, 1], [520, 40], SHAPE, SMALL, PLAIN, num_programs=8),
    "long contexts are split, through pointers": Case([1], [520], GATHERED, SMALL, PLAIN, num_programs=8),
    "prefill and decode mixed": Case([9, 1, 20], [9, 50, 41], SHAPE, SMALL, PLAIN),
    "window": Case([1, 10], [150, 70], SHAPE, SMALL, replace(PLAIN, window=33)),
    "window of the query itself": Case([1, 9], [70, 40], GATHERED, SMALL, replace(PLAIN, window=1)),
    "capped": Case([1, 9], [70, 40], SHAPE, SMALL, Softmax(0.5, None, 2.0)),
    "capped, split, in a window": Case([1], [600], GATHERED, SMALL, Softmax(0.5, 520, 2.0), num_programs=8),
    "window that is split": Case([1], [600], SHAPE, SMALL, replace(PLAIN, window=520), num_programs=8),
    "sinks": Case([1, 9], [70, 40], SHAPE, SMALL, PLAIN, has_sinks=True),
    "sinks, split": Case([1, 1], [520, 40], SHAPE, SMALL, PLAIN, num_programs=8, has_sinks=True),
    "sinks, capped, split, in a window": Case(
        [1], [600], replace(GATHERED, num_query_heads=6), SMALL, Softmax(0.5, 520, 2.0), 8, has_sinks=True
    ),
    "groups that do not fill a tile": Case([7], [20], replace(SHAPE, num_query_heads=6), SMALL, PLAIN),
    "half-precision": Case(
        [1, 11], [70, 50], replace(SHAPE, dtype_bytes=2, kv_dtype_bytes=2), SMALL, PLAIN,
        dtype=torch.float16, kv_dtype=torch.float16,
    ),
    "float8 cache": Case(
        [1, 5], [70, 33], replace(SHAPE, kv_dtype_bytes=1), SMALL, PLAIN,
        kv_dtype=torch.float8_e4m3fn,
    ),
    "float8 cache, bfloat16 queries": Case(
        [5], [33], replace(SHAPE, dtype_bytes=2, kv_dtype_bytes=1), SMALL, PLAIN,
        dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn,
    ),
    "heads of 96": Case([1, 5], [70, 33], replace(SHAPE, head_dim=96), SMALL, PLAIN),
    "heads of 80 through pointers": Case([1, 5], [40, 33], replace(GATHERED, head_dim=80), SMALL, PLAIN),
    "tiles of half a block": Case([1, 5], [150, 70], replace(SHAPE, block_size=64), SMALL, PLAIN),
    "block size no power of two": Case([3], [70], replace(SHAPE, block_size=12), SMALL, PLAIN),
    "as tuned for decodes": Case([1], [70], SHAPE, decode_tuning(SHAPE), PLAIN),
    "as tuned for prefill": Case([40], [70], SHAPE, prefill_tuning(SHAPE), PLAIN),
}  # fmt: skip


SPLIT = [
    "long contexts are split",
    "long contexts are split, through pointers",
    "window that is split",
    "sinks, split",
    "sinks, capped, split, in a window",
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_is_what_torch_computes(case: Case, device: torch.device, generator: torch.Generator) -> None:
    step = PagedStep(case, device, generator)
    step.run()
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    torch.testing.assert_close(step.out_TQD, step.reference(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SPLIT)
def test_splits_what_it_should(name: str, device: torch.device, generator: torch.Generator) -> None:
    """Otherwise these cases would test nothing."""
    plan = PagedStep(CASES[name], device, generator).plan
    assert plan.merges_RF.size
    assert plan.num_partial_rows > 0


def test_queries_may_see_nothing_of_a_part(device: torch.device, generator: torch.Generator) -> None:
    step = PagedStep(Case([8], [36], SHAPE, SMALL, PLAIN), device, generator)
    parts = [[0, 0, 8, 28, 0, 32, 0, 0], [0, 0, 8, 28, 32, 36, 8, 0]]
    step.items_IF = torch.tensor(parts, dtype=torch.int32, device=device)
    step.merges_RF = torch.tensor([[row, row, 2, 8] for row in range(8)], dtype=torch.int32, device=device)
    step.num_items.fill_(2)
    step.num_merges.fill_(8)
    step.partials = Partials.empty(16, SHAPE, device)
    step.run()
    torch.testing.assert_close(step.out_TQD, step.reference(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SPLIT)
def test_the_last_part_to_be_done_merges_all(
    name: str, device: torch.device, generator: torch.Generator
) -> None:
    """Launches twice, since every launch must reset its counts."""
    step = PagedStep(CASES[name], device, generator)
    assert step.plan.merges_RF.size
    merging = step.merging()
    for _ in range(2):
        step.out_TQD.fill_(math.nan)
        step.attend(merging)
        assert not merging.num_arrived_RH.any()
        torch.testing.assert_close(step.out_TQD, step.reference(), atol=2e-5, rtol=2e-5)


def test_merges_all_queries_of_a_tile_by_groups_that_fill_none(
    device: torch.device, generator: torch.Generator
) -> None:
    """Six heads in groups of three, and a part of which some queries see no key."""
    step = PagedStep(Case([8], [36], replace(SHAPE, num_query_heads=6), SMALL, PLAIN), device, generator)
    tiles = ((0, 5), (5, 3))
    step.items_IF = torch.tensor(
        [
            [0, row, count, 28 + row, first_key, end_key, 16 * row + part * count, row]
            for row, count in tiles
            for part, (first_key, end_key) in enumerate(((0, 32), (32, 28 + row + count)))
        ],
        dtype=torch.int32,
        device=device,
    )
    step.merges_RF = torch.tensor(
        [[row + i, 16 * row + i, 2, count] for row, count in tiles for i in range(count)],
        dtype=torch.int32,
        device=device,
    )
    step.num_items.fill_(4)
    step.partials = Partials.empty(100, step.case.shape, device)
    step.attend(step.merging())
    torch.testing.assert_close(step.out_TQD, step.reference(), atol=2e-5, rtol=2e-5)


def test_writes_only_rows_that_items_name(device: torch.device, generator: torch.Generator) -> None:
    step = PagedStep(CASES["long contexts are split"], device, generator)
    step.num_items.zero_()
    step.num_merges.zero_()
    step.run()
    assert torch.isnan(step.out_TQD).all()
    assert torch.isnan(step.partials.out_PQD).all()
    assert torch.isnan(step.partials.weight_PQ).all()


def test_one_captured_graph_serves_any_contexts(device: torch.device, generator: torch.Generator) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    first, second = (
        PagedStep(Case([1, 1], lengths, SHAPE, SMALL, PLAIN, num_programs=8), device, generator)
        for lengths in ([900, 40], [50, 60])
    )
    first.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.run()
    for name in ("items_IF", "num_items", "merges_RF", "num_merges", "q_TQD", "block_ids_BM"):
        target, source = getattr(first, name), getattr(second, name)
        target[: len(source), : source.shape[1]].copy_(source) if source.ndim == 2 else target.copy_(source)
    first.kv.kv_NKHSD[: len(second.kv.kv_NKHSD)].copy_(second.kv.kv_NKHSD)
    graph.replay()
    torch.testing.assert_close(first.out_TQD, second.reference(), atol=2e-5, rtol=2e-5)
