"""Tunings of attention fit the device: no launch wants more shared memory than a multiprocessor has."""

import pytest

from engine.kernels.attention_tuning import (
    SHARED_BYTES,
    AttentionShape,
    AttentionTuning,
    decode_tuning,
    latent_tuning,
    prefill_tuning,
)

KIB = 1024


def wanted_bytes(shape: AttentionShape, tuning: AttentionTuning, num_buffers: int) -> int:
    """The shared memory of one program: its queries, and buffers of keys and values."""
    query_bytes = tuning.block_m * shape.padded_head_dim * shape.dtype_bytes
    return query_bytes + num_buffers * 2 * tuning.block_n * shape.padded_head_dim * shape.kv_dtype_bytes


@pytest.mark.parametrize("has_copy_engine", [True, False])
@pytest.mark.parametrize("shared_bytes", [SHARED_BYTES, 160 * KIB, 96 * KIB])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_two_decodes_or_one_prefill_fit_a_multiprocessor(
    head_dim: int, block_size: int, shared_bytes: int, has_copy_engine: bool
) -> None:
    for dtype_bytes, kv_dtype_bytes in ((2, 2), (2, 1), (4, 4)):
        if dtype_bytes == 4 and head_dim == 256 and shared_bytes < SHARED_BYTES:
            continue  # does not fit; no model is served with this shape
        shape = AttentionShape(
            32, 8, head_dim, block_size, dtype_bytes, kv_dtype_bytes, has_copy_engine, shared_bytes
        )
        decode, prefill = decode_tuning(shape), prefill_tuning(shape)
        assert 2 * wanted_bytes(shape, decode, decode.num_stages - 1) <= shared_bytes
        assert wanted_bytes(shape, prefill, prefill.num_stages) <= shared_bytes


@pytest.mark.parametrize("has_chunks", [False, True])
@pytest.mark.parametrize("has_copy_engine", [True, False])
@pytest.mark.parametrize("num_heads", [1, 6, 16, 32, 40, 97, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_tiles_of_latents_fit_a_multiprocessor_and_hold_a_group(
    num_heads: int, block_size: int, has_copy_engine: bool, has_chunks: bool
) -> None:
    for dtype_bytes, kv_dtype_bytes in ((2, 2), (2, 1), (4, 4)):
        shared_bytes = SHARED_BYTES if has_copy_engine or dtype_bytes == 4 else 160 * KIB
        shape = AttentionShape(
            num_heads,
            1,
            576,
            block_size,
            dtype_bytes,
            kv_dtype_bytes,
            has_copy_engine,
            shared_bytes,
            latent_rank=512,
        )
        tuning = latent_tuning(shape, has_chunks=has_chunks)
        size = shape.padded_rank + shape.padded_rotary_dim
        is_kept = tuning.block_m == 64 or dtype_bytes == 4
        num_buffers = tuning.num_stages if is_kept else tuning.num_stages - 1
        tiles = num_buffers * tuning.block_n * size * kv_dtype_bytes
        queries = tuning.block_m * size * dtype_bytes
        assert tuning.programs_per_multiprocessor * (queries + tiles) <= shared_bytes
        assert num_buffers >= 2
        assert shape.num_groups * shape.group_size == num_heads
        assert shape.group_size <= tuning.block_m
        assert tuning.block_m <= (64 if has_copy_engine else 32)
        assert not shape.uses_tma or block_size % tuning.block_n == 0
