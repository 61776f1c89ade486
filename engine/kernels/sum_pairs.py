"""Sums each token's pairs: the last step of a mixture of experts.

Shape suffixes: T tokens, K experts of a token, N pairs (T x K), E hidden size.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.sort_pairs import ExpertPairs

BLOCK_E = 1024


def sum_pairs(
    y_NE: torch.Tensor, pairs: ExpertPairs, residual_TE: torch.Tensor | None = None
) -> torch.Tensor:
    """T x E in the dtype of `y_NE`: each token's rows, added up in float32, without rows of other ranks' experts.

    With `residual_TE`, the rounded sums are added to it in place, and it is returned.
    """
    num_tokens, num_chosen = pairs.experts_TK.shape
    assert y_NE.is_contiguous()
    assert len(y_NE) == num_tokens * num_chosen
    sum_TE = residual_TE
    if sum_TE is None:
        sum_TE = torch.empty(num_tokens, y_NE.shape[1], dtype=y_NE.dtype, device=y_NE.device)
    assert sum_TE.is_contiguous()
    assert sum_TE.dtype is y_NE.dtype
    _sum_pairs_kernel[(num_tokens, triton.cdiv(y_NE.shape[1], BLOCK_E))](
        y_NE,
        pairs.experts_TK,
        sum_TE,
        y_NE.shape[1],
        pairs.num_own_experts,
        NUM_CHOSEN=num_chosen,
        IS_ADDED=residual_TE is not None,
        BLOCK_E=BLOCK_E,
        num_warps=4,
        **launch_options(),
    )
    return sum_TE


@triton.jit
def _sum_pairs_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    experts_ptr,
    sum_ptr,
    num_columns,
    num_own_experts,
    NUM_CHOSEN: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_former(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    sum_E = tl.zeros([BLOCK_E], tl.float32)
    for chosen in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + chosen
        num_read = tl.where(tl.load(experts_ptr + pair) < num_own_experts, num_columns, 0)
        y_E = tl.load(y_ptr + pair * num_columns + columns, columns < num_read, other=0.0)
        sum_E += y_E.to(tl.float32)
    sum_ptrs = sum_ptr + token * num_columns + columns
    dtype: tl.constexpr = sum_ptr.dtype.element_ty
    if IS_ADDED:
        sum_E = sum_E.to(dtype).to(tl.float32) + tl.load(sum_ptrs, columns < num_columns, other=0.0).to(
            tl.float32
        )
    tl.store(sum_ptrs, sum_E.to(dtype), columns < num_columns)
