"""Runs between the projection and attention: rotates queries in place, writes keys and values to the pool.

One launch replaces a norm, a rotation and a scatter. Knows the pool's layout (docs/decisions/0001), no request.

Shape suffixes: T tokens, X = Q + 2 x H heads of the projection (queries, keys, values), Q query heads, D head
dimension, P positions, N blocks of the pool, K the pair (keys, values), H kv heads, S slots of a block, F = D / 2.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former

MAX_FLOAT8 = 448.0
"""The largest finite float8_e4m3fn."""

HEADS_PER_PROGRAM = 8
"""8 heads of 128 elements in 64 threads: each thread makes one 16-byte load for each half of a head. A token of
32 + 2 x 8 heads is 6 programs, which spreads a decode step of a few tokens over several multiprocessors."""


def rope_store(
    qkv_TXD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    kv_NKHSD: torch.Tensor,
    *,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotates the queries of `qkv_TXD` in place; writes rotated keys, and unchanged values, to `kv_NKHSD`.

    Pairs (i, i + D/2) are rotated by cos_sin_PD[position] (float32: D/2 cosines, then D/2 sines, scaled for the
    model). Norm weights (both or neither) add RMSNorm of each head before the rotation (Qwen3). `kv_NKHSD` is one layer
    of a KVPool. Slot = block id x S + offset in the block; a negative slot marks a padded row, which is neither read
    nor written. Positions and slots are int32; positions lie within the table.

    The pool has the projection's dtype, or is float8_e4m3fn, for which keys and values are saturated. Everything is
    computed in float32 and rounded once. Keys and values of `qkv_TXD` do not change.
    """
    num_tokens, num_heads, head_dim = qkv_TXD.shape
    _, _, num_kv_heads, block_size, pool_head_dim = kv_NKHSD.shape
    num_q_heads = num_heads - 2 * num_kv_heads
    assert num_q_heads > 0, f"{num_heads} heads leave none for queries beside 2 x {num_kv_heads}"
    assert pool_head_dim == head_dim
    assert head_dim % 2 == 0
    assert qkv_TXD.stride()[1:] == (head_dim, 1), "a token's heads are one span"
    assert kv_NKHSD[0].is_contiguous(), "a block's share of a layer is one span"
    assert cos_sin_PD.dtype is torch.float32
    assert cos_sin_PD.is_contiguous()
    assert cos_sin_PD.shape[1] == head_dim
    assert positions_T.dtype is torch.int32
    assert slots_T.dtype is torch.int32
    assert positions_T.shape == slots_T.shape == (num_tokens,)
    assert positions_T.is_contiguous()
    assert slots_T.is_contiguous()
    assert (q_norm_D is None) == (k_norm_D is None), "queries and keys are normed together"
    is_float8 = kv_NKHSD.dtype is torch.float8_e4m3fn
    assert is_float8 or kv_NKHSD.dtype is qkv_TXD.dtype, f"{qkv_TXD.dtype} does not go into {kv_NKHSD.dtype}"
    if num_tokens == 0:
        return
    padded_half = triton.next_power_of_2(head_dim // 2)
    num_groups = triton.cdiv(num_q_heads, HEADS_PER_PROGRAM) + 2 * triton.cdiv(
        num_kv_heads, HEADS_PER_PROGRAM
    )
    _rope_store_kernel[(num_tokens, num_groups)](
        qkv_TXD,
        positions_T,
        slots_T,
        cos_sin_PD,
        kv_NKHSD,
        q_norm_D,
        k_norm_D,
        qkv_TXD.stride(0),
        kv_NKHSD.stride(0),
        eps,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_HALF=padded_half,
        HEADS=HEADS_PER_PROGRAM,
        IS_FLOAT8=is_float8,
        MAX_FLOAT8=MAX_FLOAT8,
        num_warps=max(1, HEADS_PER_PROGRAM * padded_half // 256),  # 8 elements of each half per thread
        **launch_options(),
    )


@triton.jit
def _rope_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    kv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_row_stride,
    kv_block_stride,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    MAX_FLOAT8: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes up to HEADS heads of one token: only queries, only keys, or only values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, PADDED_HALF)
    # No kernel writes slots, positions and angles, so these three dependent loads come before the wait.
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angle_ptrs = cos_sin_ptr + position * HEAD_DIM + columns
    is_angle = columns < tl.where(slot >= 0, HALF, 0)
    cos = tl.load(angle_ptrs, is_angle, other=0.0)[None, :]
    sin = tl.load(angle_ptrs + HALF, is_angle, other=0.0)[None, :]
    wait_for_former(PDL)
    if slot >= 0:
        heads = tl.arange(0, HEADS)
        row_ptr = qkv_ptr + token * qkv_row_stride
        if group < Q_GROUPS + KV_GROUPS:
            if group < Q_GROUPS:
                heads += group * HEADS
                mask = (heads < NUM_Q_HEADS)[:, None] & (columns < HALF)[None, :]
                pointers = row_ptr + heads[:, None] * HEAD_DIM + columns[None, :]
                first, second = _load_normed(pointers, mask, q_norm_ptr, columns, eps, HALF)
                tl.store(pointers, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask)
                tl.store(pointers + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask)
            else:
                heads += (group - Q_GROUPS) * HEADS
                mask = (heads < NUM_KV_HEADS)[:, None] & (columns < HALF)[None, :]
                pointers = row_ptr + (NUM_Q_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
                first, second = _load_normed(pointers, mask, k_norm_ptr, columns, eps, HALF)
                row = kv_ptr + (slot // BLOCK_SIZE).to(tl.int64) * kv_block_stride
                rows = row + (heads * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
                pool_ptrs = rows[:, None] + columns[None, :]
                store_saturated(pool_ptrs, first * cos - second * sin, mask, IS_FLOAT8, MAX_FLOAT8)
                store_saturated(pool_ptrs + HALF, second * cos + first * sin, mask, IS_FLOAT8, MAX_FLOAT8)
        else:
            heads += (group - Q_GROUPS - KV_GROUPS) * HEADS
            mask = (heads < NUM_KV_HEADS)[:, None] & (columns < HALF)[None, :]
            pointers = row_ptr + (NUM_Q_HEADS + NUM_KV_HEADS + heads[:, None]) * HEAD_DIM + columns[None, :]
            first, second = _load_normed(pointers, mask, None, columns, eps, HALF)
            row = kv_ptr + (slot // BLOCK_SIZE).to(tl.int64) * kv_block_stride
            rows = row + ((NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
            pool_ptrs = rows[:, None] + columns[None, :]
            store_saturated(pool_ptrs, first, mask, IS_FLOAT8, MAX_FLOAT8)
            store_saturated(pool_ptrs + HALF, second, mask, IS_FLOAT8, MAX_FLOAT8)


@triton.jit
def _load_normed(pointers, mask, norm_ptr, columns, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of some heads in float32, normed if there is a weight."""
    first = tl.load(pointers, mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        weight = tl.load(norm_ptr + columns, columns < HALF, other=0.0).to(tl.float32)
        first *= scale * weight[None, :]
        weight = tl.load(norm_ptr + HALF + columns, columns < HALF, other=0.0).to(tl.float32)
        second *= scale * weight[None, :]
    return first, second


@triton.jit
def store_saturated(pointers, x, mask, IS_FLOAT8: tl.constexpr, MAX_FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores float32 as the pool's dtype. In float8, larger numbers become the largest finite number."""
    if IS_FLOAT8:
        x = tl.clamp(x, -MAX_FLOAT8, MAX_FLOAT8)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask)
