"""ExpertPairs: a step's pairs of a row and one of its experts, sorted by expert if there are many.

Shape suffixes: T tokens, K experts of a token, N pairs (T x K), X experts.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former

MAX_UNSORTED_TOKENS = 16
"""Steps with at most this many tokens need no sorted pairs: one tile has room for all pairs of an expert."""
BLOCK_N = 2048
"""How many pairs a program reads at a time: 8 in each thread."""


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """A step's pairs; pair n is of token n // K."""

    experts_TK: torch.Tensor
    """int32. Within one row, no number from 0 to `num_own_experts` - 1 occurs twice. All other numbers are experts of
    other ranks."""
    num_own_experts: int
    """The number of this rank's experts."""
    num_experts: int
    """The number of all ranks' experts."""
    order_N: torch.Tensor | None
    """int32: the pairs of expert 0, then the pairs of expert 1, and so on. The rest is undefined. None: not sorted."""
    counts_X: torch.Tensor | None
    """int32: the number of pairs of each expert; None if the pairs are not sorted."""

    @classmethod
    def of(cls, experts_TK: torch.Tensor, num_own_experts: int, num_experts: int) -> "ExpertPairs":
        """Sorts the pairs of more than `MAX_UNSORTED_TOKENS` tokens by expert, without waiting for the device."""
        num_tokens, num_chosen = experts_TK.shape
        assert experts_TK.is_contiguous()
        if num_tokens <= MAX_UNSORTED_TOKENS:
            return cls(experts_TK, num_own_experts, num_experts, None, None)
        num_pairs, device = num_tokens * num_chosen, experts_TK.device
        order_N = torch.empty(num_pairs, dtype=torch.int32, device=device)
        counts_X = torch.empty(num_own_experts, dtype=torch.int32, device=device)
        _sort_pairs_kernel[(num_own_experts,)](
            experts_TK, order_N, counts_X, num_pairs, BLOCK_N=BLOCK_N, num_warps=8, **launch_options()
        )
        return cls(experts_TK, num_own_experts, num_experts, order_N, counts_X)


@triton.jit(do_not_specialize=["num_pairs"])  # it changes from step to step
def _sort_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_ptr, order_ptr, counts_ptr, num_pairs, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):
    """A program finds its expert's pairs. It writes them after the pairs of all experts
    with lower numbers."""
    wait_for_former(PDL)
    expert = tl.program_id(0)
    pairs_N = tl.arange(0, BLOCK_N)
    num_lower_N = tl.zeros([BLOCK_N], tl.int32)
    first = 0
    while first < num_pairs:  # in Triton 3.6's interpreter, an argument cannot be the end of a range
        expert_N = tl.load(experts_ptr + first + pairs_N, first + pairs_N < num_pairs, other=2147483647)
        num_lower_N += (expert_N < expert).to(tl.int32)
        first += BLOCK_N
    place = tl.sum(num_lower_N, 0)
    count = 0
    first = 0
    while first < num_pairs:
        expert_N = tl.load(experts_ptr + first + pairs_N, first + pairs_N < num_pairs, other=2147483647)
        has_expert_N = (expert_N == expert).to(tl.int32)
        places_N = place + count + tl.cumsum(has_expert_N, 0) - 1
        tl.store(order_ptr + places_N, first + pairs_N, has_expert_N != 0)
        count += tl.sum(has_expert_N, 0)
        first += BLOCK_N
    tl.store(counts_ptr + expert, count)
