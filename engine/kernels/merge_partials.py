"""Merges what the parts of a long context gave into the output of attention; knows neither queries nor keys.

Shape suffixes: T tokens of the step, Q query heads, D head dimension, P rows of partial results, R merges, F their
fields.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_plan import MERGE_FIELDS

BLOCK_PARTS = 16
"""Partial results of a row that are read together."""


def merge_partials(
    partial_PQD: torch.Tensor,
    weight_PQ: torch.Tensor,
    merges_RF: torch.Tensor,
    num_merges: torch.Tensor,
    out_TQD: torch.Tensor,
    num_programs: int,
) -> None:
    """Writes the rows of `out_TQD` that the first `num_merges` (a tensor of one int32) of `merges_RF` name, no others.

    Partial results are averages, their weights the log2 of sums: the result is the average by those sums. At least one
    weight of each row is finite. Launches only.
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
        out_TQD.stride(0),
        Q=num_heads,
        D=head_dim,
        BLOCK_P=BLOCK_PARTS,
        BLOCK_D=triton.next_power_of_2(head_dim),
        FIELDS=MERGE_FIELDS,
        num_warps=4,
    )


def merge_partials_reference(
    partial_PQD: torch.Tensor, weight_PQ: torch.Tensor, merges_RF: torch.Tensor, out_TQD: torch.Tensor
) -> None:
    """The same in torch, for all of `merges_RF`."""
    for out_row, first_row, num_parts, stride in merges_RF.tolist():
        rows = slice(first_row, first_row + num_parts * stride, stride)
        weights_PQ = torch.softmax(weight_PQ[rows].double() * torch.log(torch.tensor(2.0)).item(), 0)
        merged_QD = (weights_PQ.unsqueeze(-1) * partial_PQD[rows].double()).sum(0)
        out_TQD[out_row] = merged_QD.to(out_TQD.dtype)


@triton.jit
def _merge_partials_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, weight_ptr, merges_ptr, num_merges_ptr, out_ptr, out_stride,
    Q: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < D
    for unit in range(tl.program_id(0), tl.load(num_merges_ptr) * Q, tl.num_programs(0)):
        merge_ptr, head = merges_ptr + unit // Q * FIELDS, unit % Q
        out_row = tl.load(merge_ptr).to(tl.int64)
        first_row = tl.load(merge_ptr + 1).to(tl.int64)
        num_parts = tl.load(merge_ptr + 2)
        stride = tl.load(merge_ptr + 3).to(tl.int64)

        maximum = float("-inf")
        total = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first_part in range(0, num_parts, BLOCK_P):
            parts = first_part + tl.arange(0, BLOCK_P)
            row = (first_row + parts * stride) * Q + head
            weight = tl.load(weight_ptr + row, parts < num_parts, other=float("-inf"))
            mask = (parts < num_parts)[:, None] & in_head[None, :]
            partial = tl.load(partial_ptr + row[:, None] * D + dims[None, :], mask, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(weight, 0))
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no part so far saw a key
            scaled = tl.exp2(weight - shift)
            decay = tl.exp2(maximum - shift)
            total = total * decay + tl.sum(scaled, 0)
            acc = acc * decay + tl.sum(partial * scaled[:, None], 0)
            maximum = new_maximum
        tl.store(
            out_ptr + out_row * out_stride + head * D + dims,
            (acc / total).to(out_ptr.dtype.element_ty),
            in_head,
        )
