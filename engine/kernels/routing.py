"""Chooses the experts of each row by the row's router logits, in one launch; weighs them in float32.

Shape suffixes: T tokens, X experts, K experts of a token.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.mixture_config import LEAST_SUM, Mixture


def route_rows(
    logits_TX: torch.Tensor,
    mixture: Mixture,
    bias_X: torch.Tensor | None = None,
    places_X: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, best first (int32), and their weights (float32): two tensors of T x K.

    Like `engine.layers.mixture.route`, but among experts with equal scores, this kernel always chooses those with the
    lowest numbers. A NaN counts as the largest score, and its weight is NaN. If the weights are normalized, or a
    softmax, all weights of that row are NaN. No expert is chosen twice for a row. `places_X` (int32): numbers that
    replace the experts' own numbers in the result.
    """
    num_tokens, num_experts = logits_TX.shape
    assert num_experts == mixture.num_experts
    assert logits_TX.stride(1) == 1, "a row is one span"
    experts_TK = torch.empty(num_tokens, mixture.num_chosen, dtype=torch.int32, device=logits_TX.device)
    weights_TK = torch.empty(experts_TK.shape, dtype=torch.float32, device=logits_TX.device)
    is_grouped = mixture.num_chosen_groups < mixture.num_groups
    _route_rows_kernel[(num_tokens,)](
        logits_TX,
        bias_X,
        places_X,
        experts_TK,
        weights_TK,
        logits_TX.stride(0),
        NUM_EXPERTS=num_experts,
        PADDED_X=triton.next_power_of_2(num_experts),
        NUM_CHOSEN=mixture.num_chosen,
        PADDED_K=triton.next_power_of_2(mixture.num_chosen),
        NUM_GROUPS=mixture.num_groups if is_grouped else 1,
        NUM_CHOSEN_GROUPS=mixture.num_chosen_groups if is_grouped else 1,
        NUM_COMPARED=mixture.num_compared,
        IS_SIGMOID=mixture.is_sigmoid,
        IS_NORMALIZED=mixture.is_normalized,
        LEAST_SUM=LEAST_SUM if mixture.is_sigmoid else 0.0,
        SCALE=mixture.scale,
        num_warps=1,  # maxima need no shared memory then
        **launch_options(),
    )
    return experts_TK, weights_TK


@triton.jit
def _route_rows_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    places_ptr,
    experts_ptr,
    weights_ptr,
    row_stride,
    NUM_EXPERTS: tl.constexpr,
    PADDED_X: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    PADDED_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_COMPARED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_former(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts_X = tl.arange(0, PADDED_X)
    is_expert_X = experts_X < NUM_EXPERTS
    logits_X = tl.load(logits_ptr + row * row_stride + experts_X, is_expert_X, other=-float("inf")).to(
        tl.float32
    )
    if IS_SIGMOID:
        scores_X = 1.0 / (1.0 + tl.exp(-logits_X))
    else:
        scores_X = tl.exp(logits_X - tl.max(logits_X, 0))
        scores_X = tl.div_rn(scores_X, tl.sum(scores_X, 0))
    ranked_X = scores_X
    if bias_ptr is not None:
        ranked_X += tl.load(bias_ptr + experts_X, is_expert_X, other=0.0)
    ranked_X = tl.where(ranked_X != ranked_X, float("inf"), ranked_X)
    ranked_X = tl.where(is_expert_X, ranked_X, -float("inf"))
    if NUM_GROUPS > 1:
        GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        ranked_X = _within_best_groups(
            ranked_X, experts_X, GROUP, NUM_GROUPS, NUM_CHOSEN_GROUPS, NUM_COMPARED
        )
    chosen_K = tl.arange(0, PADDED_K)
    experts_K = tl.zeros([PADDED_K], tl.int32)
    weights_K = tl.zeros([PADDED_K], tl.float32)
    for chosen in tl.static_range(NUM_CHOSEN):
        expert = _first_of_the_largest(ranked_X, experts_X, PADDED_X)
        weight = tl.sum(tl.where(experts_X == expert, scores_X, 0.0), 0)
        experts_K = tl.where(chosen_K == chosen, expert, experts_K)
        weights_K = tl.where(chosen_K == chosen, weight, weights_K)
        ranked_X = tl.where(experts_X == expert, -float("inf"), ranked_X)
    if IS_NORMALIZED:
        weights_K = tl.div_rn(weights_K, tl.sum(weights_K, 0) + LEAST_SUM)
    if SCALE != 1.0:
        weights_K *= SCALE
    is_chosen_K = chosen_K < NUM_CHOSEN
    if places_ptr is not None:
        experts_K = tl.load(places_ptr + experts_K, is_chosen_K, other=0)
    tl.store(experts_ptr + row * NUM_CHOSEN + chosen_K, experts_K, is_chosen_K)
    tl.store(weights_ptr + row * NUM_CHOSEN + chosen_K, weights_K, is_chosen_K)


@triton.jit
def _within_best_groups(  # type: ignore[no-untyped-def]
    ranked_X,
    experts_X,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_COMPARED: tl.constexpr,
):
    """`ranked_X` with -inf for the experts outside of the best groups. A group is GROUP neighbouring experts.

    Groups are compared by the sums of their best NUM_COMPARED experts.
    """
    PADDED: tl.constexpr = ranked_X.shape[0]
    groups_X = experts_X // GROUP
    sums_X = tl.full([PADDED], -float("inf"), tl.float32)  # of the expert's group
    for group in tl.static_range(NUM_GROUPS):
        is_in_X = groups_X == group
        rest_X = tl.where(is_in_X, ranked_X, -float("inf"))
        total = 0.0
        for _ in tl.static_range(NUM_COMPARED):
            best = _first_of_the_largest(rest_X, experts_X, PADDED)
            total += tl.max(rest_X, 0)
            rest_X = tl.where(experts_X == best, -float("inf"), rest_X)
        sums_X = tl.where(is_in_X, total, sums_X)
    is_visible_X = experts_X < 0
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        group = _first_of_the_largest(sums_X, experts_X, PADDED) // GROUP
        is_visible_X = is_visible_X | (groups_X == group)
        sums_X = tl.where(groups_X == group, -float("inf"), sums_X)
    return tl.where(is_visible_X, ranked_X, -float("inf"))


@triton.jit
def _first_of_the_largest(values_X, experts_X, PADDED_X: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(values_X == tl.max(values_X, 0), experts_X, PADDED_X - 1), 0)
