"""The products of a mixture of experts in one launch: multiplies each row by the matrices of its experts.

A row and one of its experts form a pair. A program multiplies one tile of pairs of one expert, and finds its tile by
numbers that only the device knows. So the host launches the largest possible number of programs, and programs without a
tile end at once. Nothing waits for the device, and one graph can be used for any routing. An expert without pairs is
not read.

* With few tokens, each program has one pair. If this is the first pair of its expert, the program's tile has all pairs
  of the expert: at most one for each token. Otherwise the program ends.
* With more tokens, pairs are sorted by expert, and tiles are numbered expert by expert. The tiles of one expert are
  computed side by side, and share its weights in the cache.

Shape suffixes: T tokens, K experts of a token, N pairs (T x K), X experts, I input features, O output features.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from engine.activation import Activation
from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.gate_mul import activation_constants, gated
from engine.kernels.skinny_epilogue import weight_row
from engine.kernels.sort_pairs import MAX_UNSORTED_TOKENS, ExpertPairs


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of each expert."""

    weight_XOI: torch.Tensor
    scales_XO: torch.Tensor | None = None
    """Set for weights in float8_e4m3fn: float32 scales. The number that is multiplied is weight * scale."""
    bias_XO: torch.Tensor | None = None
    """float32."""


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """How the kernel is launched; the blocks are powers of two."""

    block_pairs: int
    """Pairs of a tile: at least 16, the matrix units' minimum."""
    block_outputs: int
    """Outputs of a program. With 64 or more, and 4 or 8 warps, they are the rows of Hopper's wgmma."""
    block_inputs: int
    num_warps: int
    num_stages: int
    """Blocks of weights and inputs in shared memory, all but one of them in flight."""


SORTED_LAUNCHES = (
    (8.0, ExpertLaunch(16, 64, 128, num_warps=4, num_stages=3)),
    (32.0, ExpertLaunch(32, 128, 64, num_warps=4, num_stages=3)),
    (96.0, ExpertLaunch(64, 128, 64, num_warps=4, num_stages=3)),
    (math.inf, ExpertLaunch(128, 128, 64, num_warps=8, num_stages=3)),
)
"""Launches for sorted pairs. The number before each launch is the largest number of pairs per expert for which the
launch is used (measured on an H200, docs/kernels.md)."""


def choose_expert_launch(
    num_tokens: int, num_pairs: int, num_experts: int, dtype: torch.dtype, *, is_wide: bool
) -> ExpertLaunch:
    """The launch for a step's products: tiles of about as many pairs as an expert has.

    `dtype`: the inputs' dtype. `is_wide`: whether the largest tiles have twice as many outputs. This is faster for
    16-bit products without activations, whose inputs are narrow.
    """
    is_sorted = num_tokens > MAX_UNSORTED_TOKENS
    if dtype is torch.float32:  # for correctness, not speed
        return ExpertLaunch(64 if is_sorted else 16, 32, 32, num_warps=4, num_stages=2)
    if not is_sorted:
        return SORTED_LAUNCHES[0][1]
    launch = next(launch for most, launch in SORTED_LAUNCHES if num_pairs / num_experts <= most)
    return replace(launch, block_outputs=256) if is_wide and launch.block_pairs == 128 else launch


def token_counts_by_launch(num_chosen: int, num_experts: int) -> tuple[int, ...]:
    """For each way in which the products are launched: a number of tokens with which they are launched in this way."""
    sorted_from = MAX_UNSORTED_TOKENS + 1
    limits = [int(most * num_experts / num_chosen) for most, _ in SORTED_LAUNCHES[:-1]]
    return (1, sorted_from, *(limit + 1 for limit in limits if limit + 1 > sorted_from))


def expert_linear(
    x: torch.Tensor,
    matrices: ExpertMatrices,
    pairs: ExpertPairs,
    *,
    factors_N: torch.Tensor | None = None,
    activation: Activation | None = None,
    launch: ExpertLaunch | None = None,
) -> torch.Tensor:
    """`x @ weight[expert].T + bias[expert]` for each pair, N x O in x's dtype; sums in float32, rounded once.

    `x` has a row for each token, which all pairs of the token use, or a row for each pair. `factors_N` (float32)
    multiply the sums. With an `activation`, the first half of each matrix makes gates, and the second half the values
    that they scale. The result has O / 2 columns, and the products are rounded before the activation. Rows of pairs
    with experts of other ranks are undefined. `launch`: for benchmarks; None chooses by shape.
    """
    weight_XOI, scales_XO = matrices.weight_XOI, matrices.scales_XO
    num_own_experts, num_weight_rows, num_inputs = weight_XOI.shape
    num_tokens, num_chosen = pairs.experts_TK.shape
    num_pairs = num_tokens * num_chosen
    assert num_own_experts == pairs.num_own_experts
    assert x.shape[1] == num_inputs, f"{x.shape[1]} inputs for weights of {num_inputs}"
    assert len(x) in (num_tokens, num_pairs)
    assert x.stride(1) == 1, "a row is one span"
    assert weight_XOI.is_contiguous()
    assert (scales_XO is not None) == (weight_XOI.dtype is torch.float8_e4m3fn)
    assert scales_XO is not None or weight_XOI.dtype is x.dtype, f"{x.dtype} x {weight_XOI.dtype}"
    is_gated = activation is not None
    assert not is_gated or num_weight_rows % 2 == 0, f"{num_weight_rows} outputs are not pairs"
    num_outputs = num_weight_rows // 2 if is_gated else num_weight_rows
    y_NO = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return y_NO
    launch = launch or choose_expert_launch(
        num_tokens, num_pairs, pairs.num_experts, x.dtype, is_wide=not is_gated and scales_XO is None
    )
    most_tiles = num_pairs
    if pairs.order_N is not None:
        most_tiles = min(num_pairs, num_pairs // launch.block_pairs + num_own_experts)
    _expert_linear_kernel[(most_tiles, triton.cdiv(num_outputs * (1 + is_gated), launch.block_outputs))](
        x,
        weight_XOI,
        scales_XO,
        matrices.bias_XO,
        pairs.experts_TK,
        pairs.order_N,
        pairs.counts_X,
        factors_N,
        y_NO,
        x.stride(0),
        num_tokens,
        num_outputs,
        NUM_INPUTS=num_inputs,
        NUM_OWN=num_own_experts,
        PADDED_X=triton.next_power_of_2(num_own_experts),
        NUM_CHOSEN=num_chosen,
        PADDED_K=triton.next_power_of_2(num_chosen),
        PAIRS_PER_ROW=num_pairs // len(x),
        **(activation_constants(activation) if activation else {"KIND": None, "ALPHA": None, "LIMIT": None}),
        BLOCK_N=launch.block_pairs,
        BLOCK_O=launch.block_outputs,
        BLOCK_I=launch.block_inputs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch_options(),
    )
    return y_NO


@triton.jit(do_not_specialize=["num_tokens"])  # it changes from step to step
def _expert_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    experts_ptr,
    order_ptr,
    counts_ptr,
    factors_ptr,
    y_ptr,
    x_stride,
    num_tokens,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_OWN: tl.constexpr,
    PADDED_X: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    PADDED_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes weight @ x.T, so that a gate and the value that it scales may be neighbours. `num_outputs`: columns of
    y."""
    GATED: tl.constexpr = KIND is not None
    OUTPUTS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    wait_for_former(PDL)
    if order_ptr is None:
        expert, pairs_N, is_pair_N = _pairs_of_first(
            experts_ptr, num_tokens, NUM_OWN, NUM_CHOSEN, PADDED_K, BLOCK_N
        )
    else:
        expert, pairs_N, is_pair_N = _pairs_of_tile(order_ptr, counts_ptr, NUM_OWN, PADDED_X, BLOCK_N)
    pairs_N = pairs_N.to(tl.int64)
    if expert < NUM_OWN:
        rows_O = tl.arange(0, BLOCK_O)
        first_output = tl.program_id(1) * OUTPUTS
        is_row_O = first_output + (rows_O // 2 if GATED else rows_O) < num_outputs
        weight_rows_O = expert.to(tl.int64) * num_outputs * (2 if GATED else 1)
        weight_rows_O += first_output + weight_row(rows_O, num_outputs, GATED)
        columns_I = tl.arange(0, BLOCK_I)
        weight_ptrs = weight_ptr + weight_rows_O[:, None] * NUM_INPUTS + columns_I[None, :]
        x_ptrs = x_ptr + (pairs_N // PAIRS_PER_ROW)[None, :] * x_stride + columns_I[:, None]
        y_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
        for first in range(0, NUM_INPUTS, BLOCK_I):
            weight_mask, x_mask = is_row_O[:, None], is_pair_N[None, :]
            if NUM_INPUTS % BLOCK_I != 0:
                weight_mask = weight_mask & (first + columns_I < NUM_INPUTS)[None, :]
                x_mask = x_mask & (first + columns_I < NUM_INPUTS)[:, None]
            weight_OI = tl.load(weight_ptrs + first, weight_mask, other=0.0)
            x_IN = tl.load(x_ptrs + first, x_mask, other=0.0)
            # "ieee" is for float32, which would otherwise be rounded to tf32.
            y_ON = tl.dot(weight_OI.to(dtype), x_IN, y_ON, input_precision="ieee")
        if scales_ptr is not None:
            y_ON *= tl.load(scales_ptr + weight_rows_O, is_row_O, other=0.0)[:, None]
        if bias_ptr is not None:
            y_ON += tl.load(bias_ptr + weight_rows_O, is_row_O, other=0.0)[:, None]
        if GATED:
            pairs_OUN = tl.reshape(y_ON.to(dtype), [OUTPUTS, 2, BLOCK_N])
            gate_ON, up_ON = tl.split(tl.permute(pairs_OUN, (0, 2, 1)))
            y_ON = gated(gate_ON.to(tl.float32), up_ON.to(tl.float32), KIND, ALPHA, LIMIT)
        if factors_ptr is not None:
            y_ON *= tl.load(factors_ptr + pairs_N, is_pair_N, other=0.0)[None, :]
        outputs_O = first_output + tl.arange(0, OUTPUTS)
        y_ptrs = y_ptr + pairs_N[None, :] * num_outputs + outputs_O[:, None]
        tl.store(y_ptrs, y_ON.to(dtype), is_pair_N[None, :] & (outputs_O < num_outputs)[:, None])


@triton.jit
def _pairs_of_first(  # type: ignore[no-untyped-def]
    experts_ptr,
    num_tokens,
    NUM_OWN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The expert of the program's pair, and this expert's pairs by token. If an earlier pair has the same expert,
    returns NUM_OWN instead of the expert."""
    first = tl.program_id(0)
    tokens_N, chosen_K = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_K)
    pairs_NK = tokens_N[:, None] * NUM_CHOSEN + chosen_K[None, :]
    is_pair_NK = (tokens_N < num_tokens)[:, None] & (chosen_K < NUM_CHOSEN)[None, :]
    expert = tl.load(experts_ptr + first)
    has_expert_NK = tl.load(experts_ptr + pairs_NK, is_pair_NK, other=-1) == expert
    num_earlier = tl.sum(tl.sum((has_expert_NK & (pairs_NK < first)).to(tl.int32), 1), 0)
    pairs_N = tl.max(tl.where(has_expert_NK, pairs_NK, -1), 1)
    return tl.where(num_earlier > 0, NUM_OWN, expert), tl.maximum(pairs_N, 0), pairs_N >= 0


@triton.jit
def _pairs_of_tile(  # type: ignore[no-untyped-def]
    order_ptr, counts_ptr, NUM_OWN: tl.constexpr, PADDED_X: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The expert of the program's tile, and the tile's pairs. After the last tile, the expert is NUM_OWN or more."""
    tile = tl.program_id(0)
    experts_X = tl.arange(0, PADDED_X)
    counts_X = tl.load(counts_ptr + experts_X, experts_X < NUM_OWN, other=0)
    tiles_X = (counts_X + BLOCK_N - 1) // BLOCK_N
    tile_ends_X, ends_X = tl.cumsum(tiles_X, 0), tl.cumsum(counts_X, 0)
    expert = tl.sum((tile_ends_X <= tile).to(tl.int32), 0)
    is_expert_X = experts_X == expert
    first_tile = tl.sum(tl.where(is_expert_X, tile_ends_X - tiles_X, 0), 0)
    end = tl.sum(tl.where(is_expert_X, ends_X, 0), 0)
    first = tl.sum(tl.where(is_expert_X, ends_X - counts_X, 0), 0) + (tile - first_tile) * BLOCK_N
    places_N = first + tl.arange(0, BLOCK_N)
    is_pair_N = places_N < end
    return expert, tl.load(order_ptr + places_N, is_pair_N, other=0), is_pair_N
