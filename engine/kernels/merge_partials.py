"""Merges the partial results of long contexts into the output of attention; knows neither queries nor keys.

Shape suffixes: T tokens of the step, Q query heads, D head dimension, P rows of partial results, R merges, F their
fields.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_plan import MERGE_FIELDS
from engine.kernels.dependent_launch import launch_options, wait_for_former

BLOCK_PARTS = 16
"""How many partial results of a row are read together."""


def merge_partials(
    partial_PQD: torch.Tensor,
    weight_PQ: torch.Tensor,
    merges_RF: torch.Tensor,
    num_merges: torch.Tensor,
    out_TQD: torch.Tensor,
    num_programs: int,
    sinks_Q: torch.Tensor | None = None,
) -> None:
    """Computes the first `num_merges` of `merges_RF`, and writes only their rows of `out_TQD`.

    `num_merges` is a tensor of one int32. A partial result is a weighted average of values, and `weight_PQ` has
    the log2 of the sum of its weights. The merged result is the average of the parts, weighted by these sums. At
    least one part of each row has a finite log2. `sinks_Q`: see `paged_attention`. Returns when the launch is
    queued.
    """
    _, num_heads, head_dim = partial_PQD.shape
    assert partial_PQD.is_contiguous()
    assert weight_PQ.is_contiguous()
    assert merges_RF.is_contiguous()
    assert merges_RF.shape[1] == MERGE_FIELDS
    assert out_TQD.stride()[1:] == (head_dim, 1), "a token's heads lie together"
    _merge_partials_kernel[(num_programs,)](
        partial_PQD,
        weight_PQ,
        merges_RF,
        num_merges,
        out_TQD,
        sinks_Q,
        out_TQD.stride(0),
        Q=num_heads,
        D=head_dim,
        BLOCK_P=BLOCK_PARTS,
        BLOCK_D=triton.next_power_of_2(head_dim),
        FIELDS=MERGE_FIELDS,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _merge_partials_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, weight_ptr, merges_ptr, num_merges_ptr, out_ptr, sinks_ptr, out_stride,
    Q: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_former(PDL)
    for unit in range(tl.program_id(0), tl.load(num_merges_ptr) * Q, tl.num_programs(0)):
        merge_row(
            partial_ptr, weight_ptr, merges_ptr + unit // Q * FIELDS, unit % Q, 1, out_ptr, sinks_ptr, out_stride,
            Q, D, 1, BLOCK_P, BLOCK_D,
        )  # fmt: skip


@triton.jit
def merge_row(  # type: ignore[no-untyped-def]
    partial_ptr, weight_ptr, merge_ptr, first_head, num_heads, out_ptr, sinks_ptr, out_stride,
    Q: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes `num_heads` heads, at most BLOCK_H, of the row that the merge at `merge_ptr` names. Loads bypass L1:
    another program of this launch may have written the parts."""
    heads = first_head + tl.arange(0, BLOCK_H)
    has_head = tl.arange(0, BLOCK_H) < num_heads
    dims = tl.arange(0, BLOCK_D)
    out_row = tl.load(merge_ptr).to(tl.int64)
    first_row = tl.load(merge_ptr + 1).to(tl.int64)
    num_parts = tl.load(merge_ptr + 2)
    stride = tl.load(merge_ptr + 3).to(tl.int64)

    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for first_part in range(0, num_parts, BLOCK_P):
        parts = first_part + tl.arange(0, BLOCK_P)
        rows = (first_row + parts * stride)[None, :] * Q + heads[:, None]
        is_part = has_head[:, None] & (parts < num_parts)[None, :]
        weight = tl.load(weight_ptr + rows, is_part, other=float("-inf"), cache_modifier=".cg")
        mask = is_part[:, :, None] & (dims < D)[None, None, :]
        partial_ptrs = partial_ptr + rows[:, :, None] * D + dims[None, None, :]
        partial = tl.load(partial_ptrs, mask, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(weight, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no part so far saw a key
        scaled = tl.exp2(weight - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(scaled, 1)
        acc = acc * decay[:, None] + tl.sum(partial * scaled[:, :, None], 1)
        maximum = new_maximum
    total = add_sinks(total, maximum, sinks_ptr, heads, has_head)
    total = tl.where(has_head, total, 1.0)
    out_ptrs = out_ptr + out_row * out_stride + heads[:, None] * D + dims[None, :]
    mask = has_head[:, None] & (dims < D)[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def add_sinks(total, maximum, sinks_ptr, heads, has_head):  # type: ignore[no-untyped-def]
    """Adds the weights of the heads' sinks to sums of weights, relative to 2^maximum. Powers stay finite, and NaN stays
    NaN."""
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, has_head, other=0.0)
        power = sinks * 1.4426950408889634 - maximum
        total += tl.exp2(tl.where(power > 126.0, 126.0, power))
    return total
