"""The products of a mixture of experts in one launch: multiplies each row by the matrices of its experts.

A row and one of its experts form a pair. Pairs are sorted by expert, and a program multiplies up to one tile
of rows of one expert. The program finds its expert by the number of pairs of each expert, which only the
device knows. So the host launches the largest possible number of programs, and programs without a tile end at
once. Nothing waits for the device, and one graph can be used for any routing. An expert without pairs is not
read. With expert parallelism, pairs with experts of other ranks are sorted to the end, and no tile contains
them.

Shape suffixes: T tokens, K experts of a token, N pairs (T x K), X experts, I input features, O output features.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_FEW_TOKENS = 16
"""Steps with at most this many tokens use tiles of 16 pairs, the matrix units' minimum: most experts have
fewer pairs."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of each expert."""

    weight_XOI: torch.Tensor
    scales_XO: torch.Tensor | None = None
    """float32, of weights in float8_e4m3fn, which then mean weight x scale."""
    bias_XO: torch.Tensor | None = None
    """float32."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """A step's pairs; pair n is of token n // K."""

    order_N: torch.Tensor
    """int64: the pairs of expert 0, then those of expert 1, ..."""
    counts_X: torch.Tensor
    """int32: pairs of each expert."""
    num_tokens: int
    is_here_N: torch.Tensor | None = None
    """Whether a pair's expert is on this rank; None: all are."""

    @classmethod
    def of(cls, experts_TK: torch.Tensor, num_experts: int, *, has_others: bool = False) -> "SortedPairs":
        """Sorts pairs by expert, without waiting for the device.

        `has_others`: whether the number `num_experts` means an expert of another rank.
        """
        experts_N = experts_TK.flatten()
        counts_X = torch.zeros(num_experts + has_others, dtype=torch.int32, device=experts_N.device)
        counts_X.scatter_add_(0, experts_N, torch.ones_like(experts_N, dtype=torch.int32))
        is_here_N = experts_N < num_experts if has_others else None
        return cls(experts_N.argsort(stable=True), counts_X[:num_experts], len(experts_TK), is_here_N)


def expert_linear(
    x: torch.Tensor, matrices: ExpertMatrices, pairs: SortedPairs, factors_N: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight[expert].T + bias[expert]` for each pair, N x O in x's dtype; sums in float32, rounded once.

    `x` has a row for each token, which all its pairs take, or for each pair. `factors_N` (float32) multiply the sums.
    Rows of pairs with experts of other ranks are 0 with `factors_N`, and undefined without.
    """
    weight_XOI, scales_XO = matrices.weight_XOI, matrices.scales_XO
    num_experts, num_outputs, num_inputs = weight_XOI.shape
    num_pairs = len(pairs.order_N)
    assert x.shape[1] == num_inputs, f"{x.shape[1]} inputs for weights of {num_inputs}"
    assert len(x) in (pairs.num_tokens, num_pairs)
    assert x.stride(1) == 1, "a row is one span"
    assert weight_XOI.is_contiguous()
    assert (scales_XO is not None) == (weight_XOI.dtype is torch.float8_e4m3fn)
    assert scales_XO is not None or weight_XOI.dtype is x.dtype, f"{x.dtype} x {weight_XOI.dtype}"
    is_filled = pairs.is_here_N is not None and factors_N is not None
    make = torch.zeros if is_filled else torch.empty
    y_NO = make((num_pairs, num_outputs), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return y_NO
    is_few = pairs.num_tokens <= MAX_FEW_TOKENS
    is_float32 = x.dtype is torch.float32  # for correctness, not speed
    block_rows = 16 if is_few else 64
    block_outputs = 32 if is_float32 else 64 if is_few else 128
    most_tiles = min(num_pairs, num_pairs // block_rows + num_experts)
    _expert_linear_kernel[(most_tiles, triton.cdiv(num_outputs, block_outputs))](
        x,
        weight_XOI,
        scales_XO,
        matrices.bias_XO,
        pairs.order_N,
        pairs.counts_X,
        factors_N,
        y_NO,
        x.stride(0),
        num_outputs,
        NUM_INPUTS=num_inputs,
        NUM_EXPERTS=num_experts,
        PADDED_X=triton.next_power_of_2(num_experts),
        PAIRS_PER_ROW=num_pairs // len(x),
        BLOCK_N=block_rows,
        BLOCK_O=block_outputs,
        BLOCK_I=32 if is_float32 else 128 if is_few else 64,
        num_warps=4,
        num_stages=2 if is_float32 else 4,
    )
    return y_NO


@triton.jit
def _expert_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    counts_ptr,
    factors_ptr,
    y_ptr,
    x_stride,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED_X: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Tiles are numbered expert by expert. Those of one expert run side by side, and share its weights in the cache."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tile = tl.program_id(0)
    experts = tl.arange(0, PADDED_X)
    counts_X = tl.load(counts_ptr + experts, experts < NUM_EXPERTS, other=0)
    tiles_X = (counts_X + BLOCK_N - 1) // BLOCK_N
    tile_ends_X, ends_X = tl.cumsum(tiles_X, 0), tl.cumsum(counts_X, 0)
    if tile < tl.sum(tiles_X, 0):
        expert = tl.sum((tile_ends_X <= tile).to(tl.int32), 0)
        is_it = experts == expert
        first_tile = tl.sum(tl.where(is_it, tile_ends_X - tiles_X, 0), 0)
        end = tl.sum(tl.where(is_it, ends_X, 0), 0)
        first = tl.sum(tl.where(is_it, ends_X - counts_X, 0), 0) + (tile - first_tile) * BLOCK_N
        places = first + tl.arange(0, BLOCK_N)
        is_pair = places < end
        pairs = tl.load(order_ptr + places, is_pair, other=0)
        outputs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        is_output = outputs < num_outputs
        columns = tl.arange(0, BLOCK_I)
        row = expert.to(tl.int64) * num_outputs + outputs
        weight_ptrs = weight_ptr + row[None, :] * NUM_INPUTS + columns[:, None]
        x_ptrs = x_ptr + (pairs // PAIRS_PER_ROW)[:, None] * x_stride + columns[None, :]
        y_NO = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
        for begin in range(0, NUM_INPUTS, BLOCK_I):
            x_mask, weight_mask = is_pair[:, None], is_output[None, :]
            if NUM_INPUTS % BLOCK_I != 0:
                x_mask = x_mask & (begin + columns < NUM_INPUTS)[None, :]
                weight_mask = weight_mask & (begin + columns < NUM_INPUTS)[:, None]
            x_NI = tl.load(x_ptrs + begin, x_mask, other=0.0)
            weight_IO = tl.load(weight_ptrs + begin, weight_mask, other=0.0)
            # "ieee" is for float32, which would otherwise be rounded to tf32.
            y_NO = tl.dot(x_NI, weight_IO.to(dtype), y_NO, input_precision="ieee")
        if scales_ptr is not None:
            y_NO *= tl.load(scales_ptr + row, is_output, other=0.0)[None, :]
        if bias_ptr is not None:
            y_NO += tl.load(bias_ptr + row, is_output, other=0.0)[None, :]
        if factors_ptr is not None:
            y_NO *= tl.load(factors_ptr + pairs, is_pair, other=0.0)[:, None]
        y_ptrs = y_ptr + pairs[:, None] * num_outputs + outputs[None, :]
        tl.store(y_ptrs, y_NO.to(dtype), is_pair[:, None] & is_output[None, :])
