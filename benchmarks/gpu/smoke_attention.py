"""Smoke tests of attention: split decodes, chunks of prompts, float8 caches, and float32 queries.

Shape suffixes: Q query heads, D head size, P rows of partial results, R merges.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.smoke_case import Maker, Outputs, Shapes, SmokeCase
from engine.kernels.attention_tuning import AttentionShape, decode_tuning, prefill_tuning
from engine.kernels.merge_partials import merge_partials
from engine.kernels.paged_attention import Softmax
from tests.kernels.attention_steps import Case, PagedStep
from tests.kernels.references import merge_partials_reference

NUM_PROGRAMS = 264
"""Number of programs. It is large enough that long contexts are split."""
KINDS = ("decode", "decode that merges", "prefill")
"""In "decode", another launch merges the parts of split contexts. In "decode that merges", the program that
ends last merges them."""


def makers(shapes: Shapes) -> list[Maker]:
    """Makers of cases. Every pair of dtypes of queries and cache is compiled separately."""
    fp8 = torch.float8_e4m3fn
    if shapes.device.type == "cpu":
        kinds = [(kind, shapes.dtype, shapes.kv_dtype) for kind in KINDS]
    else:
        floats = ((shapes.dtype, shapes.kv_dtype), (shapes.dtype, fp8), (torch.float32, torch.float32))
        kinds = [(kind, dtype, kv_dtype) for kind in KINDS for dtype, kv_dtype in floats]
    return [*(partial(_attention, shapes, *kind) for kind in kinds), partial(_merge, shapes)]


def _attention(shapes: Shapes, kind: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[SmokeCase]:
    shape = AttentionShape(*shapes.heads, shapes.block_size, dtype.itemsize, kv_dtype.itemsize)
    is_dry = shapes.device.type == "cpu"
    if kind != "prefill":
        contexts = [3, 600] if is_dry else [1, 64, 700, 9000]
        queries, tuning = [1] * len(contexts), decode_tuning(shape)
    else:
        queries, contexts, tuning = [3] if is_dry else [700], [5] if is_dry else [1500], prefill_tuning(shape)
    softmax, programs = Softmax(shapes.heads[2] ** -0.5), 8 if is_dry else NUM_PROGRAMS
    case = Case(queries, contexts, shape, tuning, softmax, programs, dtype, kv_dtype)
    step = PagedStep(case, shapes.device, torch.Generator(shapes.device).manual_seed(0))
    assert kind == "prefill" or step.plan.merges_RF.size, "nothing is split"
    merging = step.merging() if kind == "decode that merges" else None

    def launch() -> Outputs:
        step.out_TQD.fill_(torch.nan)
        if merging is None:
            step.run()
        else:
            step.attend(merging)
        return (step.out_TQD.clone(),)

    names = [str(each).removeprefix("torch.") for each in (dtype, kv_dtype)]
    yield SmokeCase(
        f"attention, {kind}, {names[0]} over {names[1]}",
        ("paged_attention", "merge_partials"),
        launch,
        lambda: (step.reference(),),
        2e-5 if dtype is torch.float32 else 1e-2,
    )


def _merge(shapes: Shapes) -> Iterator[SmokeCase]:
    """Merges two rows of three parts each. The parts of the two rows alternate."""
    num_heads, _, head_dim = shapes.heads
    partial_PQD = shapes.randn(6, num_heads, head_dim, dtype=torch.float32)
    weight_PQ = shapes.randn(6, num_heads, dtype=torch.float32)
    merges_RF = shapes.int32([[0, 0, 3, 2], [1, 1, 3, 2]])
    num_merges = shapes.int32([2])

    def merged(is_reference: bool) -> Outputs:
        out_TQD = torch.full((2, num_heads, head_dim), torch.nan, dtype=shapes.dtype, device=shapes.device)
        if is_reference:
            merge_partials_reference(partial_PQD, weight_PQ, merges_RF, out_TQD)
        else:
            merge_partials(partial_PQD, weight_PQ, merges_RF, num_merges, out_TQD, 4)
        return (out_TQD,)

    yield SmokeCase(
        "merge_partials", ("merge_partials",), partial(merged, False), partial(merged, True), shapes.max_error
    )
