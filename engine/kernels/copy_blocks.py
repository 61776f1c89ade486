"""Copies whole KV blocks from pool to pool by pairs of block ids; either pool may be pinned host memory.

Shape suffixes: N blocks of the source, M of the target, B bytes of a block, P pairs.
"""

import torch
import triton
import triton.language as tl

VECTOR_BYTES = 16
VECTORS_PER_CHUNK = 1024
"""16 KiB: eight 16-byte loads in each of 128 threads, all in flight before the first store."""

MAX_DEVICE_PROGRAMS = 132 * 8
"""8 programs x 16 KiB on each of a Hopper's multiprocessors: more in flight than its memory needs to be busy."""

MAX_HOST_PROGRAMS = 32
"""0.5 MiB in flight keeps PCIe busy (55 GB/s x 2 us = 0.1 MiB), and leaves most of the GPU to other work."""


def copy_blocks(source_NB: torch.Tensor, target_MB: torch.Tensor, pairs_P2: torch.Tensor) -> None:
    """Copies block pairs_P2[p, 0] of the source to block pairs_P2[p, 1] of the target.

    Pools are uint8, contiguous, with equal blocks of a multiple of 16 bytes; either may be pinned host memory, which
    the GPU then reads or writes directly. `pairs_P2` is int32, on the kernel's device. No block may be both source and
    target. The launch is ordered on the current stream: the host must wait before it touches its pool.
    """
    assert source_NB.dtype is target_MB.dtype is torch.uint8
    assert source_NB.is_contiguous()
    assert target_MB.is_contiguous()
    assert source_NB.shape[1] == target_MB.shape[1], (
        f"blocks of {source_NB.shape[1]} and {target_MB.shape[1]} bytes"
    )
    assert source_NB.shape[1] % VECTOR_BYTES == 0, f"{source_NB.shape[1]} bytes are not whole vectors"
    assert source_NB.data_ptr() % VECTOR_BYTES == target_MB.data_ptr() % VECTOR_BYTES == 0
    assert pairs_P2.dtype is torch.int32
    assert pairs_P2.is_contiguous()
    vectors_per_block = source_NB.shape[1] // VECTOR_BYTES
    chunks_per_block = triton.cdiv(vectors_per_block, VECTORS_PER_CHUNK)
    num_chunks = len(pairs_P2) * chunks_per_block
    if num_chunks == 0:
        return
    num_programs = min(num_chunks, max_programs(source_NB, target_MB))
    _copy_blocks_kernel[(num_programs,)](
        source_NB.view(torch.int32),
        target_MB.view(torch.int32),
        pairs_P2,
        vectors_per_block,
        chunks_per_block,
        num_chunks,
        VECTORS=VECTORS_PER_CHUNK,
        num_warps=4,
    )


def max_programs(source: torch.Tensor, target: torch.Tensor) -> int:
    """How many programs keep the path between the two pools busy."""
    is_on_device = source.device.type == target.device.type == "cuda"
    return MAX_DEVICE_PROGRAMS if is_on_device else MAX_HOST_PROGRAMS


@triton.jit(do_not_specialize=["num_chunks"])  # it changes from call to call
def _copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source_ptr,
    target_ptr,
    pairs_ptr,
    vectors_per_block,
    chunks_per_block,
    num_chunks,
    VECTORS: tl.constexpr,
):
    """Program p of n copies chunks p, p + n, p + 2 n, ..."""
    vectors = tl.arange(0, VECTORS)
    words = tl.arange(0, 4)
    chunk = tl.program_id(0)
    while chunk < num_chunks:
        pair = chunk // chunks_per_block
        first = (chunk % chunks_per_block) * VECTORS
        source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * vectors_per_block + first
        target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * vectors_per_block + first
        # Written as 4 x something + words, so that the compiler uses 16-byte accesses for every block size.
        within = 4 * vectors[:, None] + words[None, :]
        mask = (first + vectors < vectors_per_block)[:, None]
        data = tl.load(source_ptr + 4 * source + within, mask)
        tl.store(target_ptr + 4 * target + within, data, mask)
        chunk += tl.num_programs(0)
