"""Runs between projections and attention to latents: rotates queries in place, writes latents to the pool.

Knows the pool's layout (docs/decisions/0023), no request.

Shape suffixes: T tokens, P = Q + 1 rows of a token (queries, latent), C latent, R rotated part, D = C + R, X positions,
N blocks of the pool, S slots of a block.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.rope_store import MAX_FLOAT8, store_saturated

HEADS_PER_PROGRAM = 32
"""32 heads of 64 rotated numbers in 128 threads: each thread loads 8 numbers of each half of a head."""


def latent_store(
    rows_TPD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_sin_XR: torch.Tensor,
    latents_NSD: torch.Tensor,
) -> None:
    """Rotates the last R numbers of queries in `rows_TPD` in place; writes the last row, rotated in the same way, to
    `latents_NSD`.

    Positions, slots and angles as in `rope_store`: a negative slot marks a padded row, which is neither read nor
    written. The pool has the rows' dtype, or is float8_e4m3fn, for which latents are saturated. Everything is computed
    in float32 and rounded once. The last row of `rows_TPD` does not change.
    """
    num_tokens, num_rows, size = rows_TPD.shape
    rotary_dim = cos_sin_XR.shape[1]
    rank = size - rotary_dim
    assert num_rows > 1, "a latent and no query"
    assert rank > 0
    assert rotary_dim % 2 == 0
    assert latents_NSD.shape[2] == size
    assert rows_TPD.stride()[1:] == (size, 1), "a token's rows are one span"
    assert latents_NSD[0].is_contiguous(), "a block's share of a layer is one span"
    assert cos_sin_XR.dtype is torch.float32
    assert cos_sin_XR.is_contiguous()
    assert positions_T.dtype is slots_T.dtype is torch.int32
    assert positions_T.shape == slots_T.shape == (num_tokens,)
    assert positions_T.is_contiguous()
    assert slots_T.is_contiguous()
    is_float8 = latents_NSD.dtype is torch.float8_e4m3fn
    assert is_float8 or latents_NSD.dtype is rows_TPD.dtype, (
        f"{rows_TPD.dtype} does not go into {latents_NSD.dtype}"
    )
    if num_tokens == 0:
        return
    _latent_store_kernel[(num_tokens, 1 + triton.cdiv(num_rows - 1, HEADS_PER_PROGRAM))](
        rows_TPD,
        positions_T,
        slots_T,
        cos_sin_XR,
        latents_NSD,
        rows_TPD.stride(0),
        latents_NSD.stride(0),
        NUM_HEADS=num_rows - 1,
        BLOCK_SIZE=latents_NSD.shape[1],
        C=rank,
        R=rotary_dim,
        PADDED_C=triton.next_power_of_2(rank),
        PADDED_HALF=triton.next_power_of_2(rotary_dim // 2),
        HEADS=HEADS_PER_PROGRAM,
        IS_FLOAT8=is_float8,
        MAX_FLOAT8=MAX_FLOAT8,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _latent_store_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    latents_ptr,
    token_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PADDED_C: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    MAX_FLOAT8: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program of a token stores its latent; every other program rotates up to HEADS queries."""
    D: tl.constexpr = C + R
    HALF: tl.constexpr = R // 2
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, PADDED_HALF)
    # No kernel writes slots, positions and angles, so these three dependent loads come before the wait.
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angle_ptrs = cos_sin_ptr + position * R + columns
    is_angle = columns < tl.where(slot >= 0, HALF, 0)
    cos = tl.load(angle_ptrs, is_angle, other=0.0)
    sin = tl.load(angle_ptrs + HALF, is_angle, other=0.0)
    wait_for_former(PDL)
    if slot >= 0:
        row_ptr = rows_ptr + token * token_stride
        if group == 0:
            latent_ptr = row_ptr + NUM_HEADS * D
            slot_ptr = latents_ptr + (slot // BLOCK_SIZE).to(tl.int64) * block_stride + slot % BLOCK_SIZE * D
            dims = tl.arange(0, PADDED_C)
            latent = tl.load(latent_ptr + dims, dims < C, other=0.0).to(tl.float32)
            store_saturated(slot_ptr + dims, latent, dims < C, IS_FLOAT8, MAX_FLOAT8)
            is_rotated = columns < HALF
            real = tl.load(latent_ptr + C + columns, is_rotated, other=0.0).to(tl.float32)
            imaginary = tl.load(latent_ptr + C + HALF + columns, is_rotated, other=0.0).to(tl.float32)
            target_ptrs = slot_ptr + C + columns
            store_saturated(target_ptrs, real * cos - imaginary * sin, is_rotated, IS_FLOAT8, MAX_FLOAT8)
            store_saturated(
                target_ptrs + HALF, imaginary * cos + real * sin, is_rotated, IS_FLOAT8, MAX_FLOAT8
            )
        else:
            heads = (group - 1) * HEADS + tl.arange(0, HEADS)
            mask = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
            query_ptrs = row_ptr + C + heads[:, None] * D + columns[None, :]
            first = tl.load(query_ptrs, mask, other=0.0).to(tl.float32)
            second = tl.load(query_ptrs + HALF, mask, other=0.0).to(tl.float32)
            dtype = rows_ptr.dtype.element_ty
            tl.store(query_ptrs, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask)
            tl.store(query_ptrs + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask)
