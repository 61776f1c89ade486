"""Attention to paged latents, against float64: the kernel alone, and with the merge of its parts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.kernels.attention_plan import ITEM_FIELDS
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning, latent_tuning
from engine.kernels.latent_attention import LatentKV, latent_attention
from engine.kernels.paged_attention import Partials
from tests.kernels.attention_steps import Case, LatentStep

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def _launch(
    num_heads: int,
    *,
    has_chunks: bool = False,
    block_size: int = 64,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
) -> Callable[[], None]:
    """DeepSeek's latents: 512 numbers and 64 rotated ones. Queries lie beside the latent, as in a model."""
    kv_dtype = kv_dtype or dtype
    shape = AttentionShape(num_heads, 1, 576, block_size, dtype.itemsize, kv_dtype.itemsize, latent_rank=512)

    def launch() -> None:
        blocks_NLKHSD = torch.empty(2, 2, 1, 1, block_size, 576, dtype=kv_dtype)
        latent_attention(
            torch.empty(1, num_heads + 1, 576, dtype=dtype)[:, :-1],
            LatentKV(blocks_NLKHSD[:, 1, 0, 0], shape),
            torch.zeros(1, 64, dtype=torch.int32),
            torch.zeros(1, ITEM_FIELDS, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            Partials.empty(1, shape, torch.device("cpu")),
            torch.empty(1, num_heads, 512, dtype=dtype),
            0.1,
            latent_tuning(shape, has_chunks=has_chunks),
            132,
        )

    return launch


# DeepSeek-V2-Lite has 16 heads, V2 and V3 have 128; the latter are divided among ranks.
LAUNCHES = {
    "decode, 16 heads": _launch(16),
    "decode, 32 heads": _launch(32),
    "decode, 128 heads": _launch(128),
    "decode, 16 heads, blocks of 16": _launch(16, block_size=16),
    "decode, 128 heads, blocks of 16": _launch(128, block_size=16),
    "decode, 16 heads, float8 cache": _launch(16, kv_dtype=FP8),
    "decode, 32 heads, float8 cache": _launch(32, kv_dtype=FP8),
    "decode, 128 heads, float8 cache": _launch(128, kv_dtype=FP8),
    "decode, 16 heads, float32": _launch(16, dtype=torch.float32),
    "prefill, 16 heads": _launch(16, has_chunks=True),
    "prefill, 128 heads": _launch(128, has_chunks=True),
    "prefill, 16 heads, blocks of 16": _launch(16, has_chunks=True, block_size=16),
    "prefill, 16 heads, float8 cache": _launch(16, has_chunks=True, kv_dtype=FP8),
}
USUAL = ("decode, 128 heads, float8 cache", "prefill, 16 heads")
"""The first of all is compiled for sm_80."""
RARE = [name for name in LAUNCHES if name not in USUAL]


SMALL = AttentionTuning(block_m=16, block_n=32, num_warps=4, num_stages=2, programs_per_multiprocessor=1)
SHAPE = AttentionShape(4, 1, 48, 32, 4, 4, latent_rank=32)
GATHERED = replace(SHAPE, block_size=16)
CASES = {
    "decode": Case([1, 1, 1], [1, 33, 64], SHAPE, SMALL),
    "decode through pointers": Case([1, 1, 1], [1, 33, 64], GATHERED, SMALL),
    "long contexts are split": Case([1, 1], [520, 40], SHAPE, SMALL, num_programs=8),
    "prefill and decode mixed": Case([9, 1, 20], [9, 50, 41], SHAPE, SMALL),
    "heads in three groups": Case([1, 3], [33, 20], replace(SHAPE, num_query_heads=36), SMALL),
    "heads in groups, split": Case([1], [1500], replace(SHAPE, num_query_heads=36), SMALL, num_programs=8),
    "groups that do not fill a tile": Case([7], [20], replace(GATHERED, num_query_heads=6), SMALL),
    "sizes no power of two": Case(
        [1, 5], [40, 33], replace(SHAPE, head_dim=32, latent_rank=24), SMALL
    ),
    "sizes no power of two, through pointers": Case(
        [1, 5], [40, 33], replace(GATHERED, head_dim=28, latent_rank=20), SMALL
    ),
    "half-precision": Case(
        [1, 11], [70, 50], replace(SHAPE, dtype_bytes=2, kv_dtype_bytes=2), SMALL,
        dtype=torch.float16, kv_dtype=torch.float16,
    ),
    "float8 cache": Case([1, 5], [70, 33], replace(SHAPE, kv_dtype_bytes=1), SMALL, kv_dtype=FP8),
    "float8 cache, bfloat16 queries": Case(
        [5], [33], replace(SHAPE, dtype_bytes=2, kv_dtype_bytes=1), SMALL, dtype=BF16, kv_dtype=FP8
    ),
    "as tuned for decodes": Case([1], [70], SHAPE, latent_tuning(SHAPE, has_chunks=False)),
    "as tuned for chunks": Case([6], [70], SHAPE, latent_tuning(SHAPE, has_chunks=True)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_is_what_torch_computes(case: Case, device: torch.device, generator: torch.Generator) -> None:
    step = LatentStep(case, device, generator)
    step.run()
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, BF16: 1e-2}[case.dtype]
    torch.testing.assert_close(step.out_TQD, step.reference(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["long contexts are split", "heads in groups, split"])
def test_splits_what_it_should(name: str, device: torch.device, generator: torch.Generator) -> None:
    """Otherwise these cases would test nothing."""
    assert LatentStep(CASES[name], device, generator).plan.merges_RF.size


def test_queries_may_see_nothing_of_a_part(device: torch.device, generator: torch.Generator) -> None:
    step = LatentStep(Case([8], [36], replace(SHAPE, num_query_heads=2), SMALL), device, generator)
    parts = [[0, 0, 8, 28, 0, 32, 0, 0], [0, 0, 8, 28, 32, 36, 8, 0]]
    step.items_IF = torch.tensor(parts, dtype=torch.int32, device=device)
    step.merges_RF = torch.tensor([[row, row, 2, 8] for row in range(8)], dtype=torch.int32, device=device)
    step.num_items.fill_(2)
    step.num_merges.fill_(8)
    step.partials = Partials.empty(16, step.case.shape, device)
    step.run()
    torch.testing.assert_close(step.out_TQD, step.reference(), atol=2e-5, rtol=2e-5)


def test_writes_only_rows_that_items_name(device: torch.device, generator: torch.Generator) -> None:
    step = LatentStep(CASES["long contexts are split"], device, generator)
    step.num_items.zero_()
    step.num_merges.zero_()
    step.run()
    assert torch.isnan(step.out_TQD).all()
    assert torch.isnan(step.partials.out_PQD).all()
