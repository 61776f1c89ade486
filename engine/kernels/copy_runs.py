"""Runs of bytes scattered over a pool into one contiguous buffer, and back.

Shape suffixes: B bytes, R pieces, 3 = (offset in the pool, offset in the buffer, length), each in units of 16 bytes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.kernels.copy_blocks import VECTOR_BYTES, VECTORS_PER_CHUNK, max_programs

PIECE_BYTES = 64 * 1024
"""Runs are cut into pieces of at most so much, so that a single long run is the work of many programs too."""


def run_pieces(offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The int64 pieces_R3 of runs of the pool, packed one after the other in the buffer; in host memory.

    Offsets and lengths are bytes, multiples of 16. The caller brings the result to the device (from pinned memory, if
    the host is not to wait), and sizes the buffer: `sum(lengths)`.
    """
    pieces: list[tuple[int, int, int]] = []
    packed = 0
    for offset, length in zip(offsets, lengths, strict=True):
        assert min(offset, length) >= 0, f"{length} bytes at {offset}"
        assert offset % VECTOR_BYTES == length % VECTOR_BYTES == 0, (
            f"{length} bytes at {offset}: no multiples of 16"
        )
        for first in range(0, length, PIECE_BYTES):
            size = min(PIECE_BYTES, length - first)
            pieces.append(
                ((offset + first) // VECTOR_BYTES, (packed + first) // VECTOR_BYTES, size // VECTOR_BYTES)
            )
        packed += length
    return torch.tensor(pieces, dtype=torch.int64).view(len(pieces), 3)


def gather_runs(pool_B: torch.Tensor, pieces_R3: torch.Tensor, buffer_B: torch.Tensor) -> None:
    """Copies each piece from the pool to its place in the buffer.

    Both are flat uint8, either may be pinned host memory; the pieces are where the kernel runs, and lie within both.
    """
    _launch(pool_B, pieces_R3, buffer_B, is_gather=True)


def scatter_runs(buffer_B: torch.Tensor, pieces_R3: torch.Tensor, pool_B: torch.Tensor) -> None:
    """Copies each piece from the buffer to its place in the pool; pieces may not overlap there. Else as gather_runs."""
    _launch(pool_B, pieces_R3, buffer_B, is_gather=False)


def gather_runs_reference(pool_B: torch.Tensor, pieces_R3: torch.Tensor, buffer_B: torch.Tensor) -> None:
    """`gather_runs` in torch; waits for the pieces."""
    for in_pool, in_buffer, length in (VECTOR_BYTES * pieces_R3).tolist():
        buffer_B[in_buffer : in_buffer + length].copy_(pool_B[in_pool : in_pool + length])


def scatter_runs_reference(buffer_B: torch.Tensor, pieces_R3: torch.Tensor, pool_B: torch.Tensor) -> None:
    """`scatter_runs` in torch; waits for the pieces."""
    gather_runs_reference(buffer_B, pieces_R3[:, [1, 0, 2]], pool_B)


def _launch(pool_B: torch.Tensor, pieces_R3: torch.Tensor, buffer_B: torch.Tensor, is_gather: bool) -> None:
    for memory_B in (pool_B, buffer_B):
        assert memory_B.dtype is torch.uint8
        assert memory_B.ndim == 1
        assert memory_B.is_contiguous()
        assert memory_B.data_ptr() % VECTOR_BYTES == memory_B.numel() % VECTOR_BYTES == 0
    assert pieces_R3.dtype is torch.int64
    assert pieces_R3.is_contiguous()
    if len(pieces_R3) == 0:
        return
    num_programs = min(len(pieces_R3), max_programs(pool_B, buffer_B))
    _copy_runs_kernel[(num_programs,)](
        pool_B.view(torch.int32),
        buffer_B.view(torch.int32),
        pieces_R3,
        len(pieces_R3),
        IS_GATHER=is_gather,
        VECTORS=VECTORS_PER_CHUNK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_pieces"])  # it changes from call to call
def _copy_runs_kernel(  # type: ignore[no-untyped-def]
    pool_ptr, buffer_ptr, pieces_ptr, num_pieces, IS_GATHER: tl.constexpr, VECTORS: tl.constexpr
):
    """Program p copies pieces p, p + programs, ..."""
    vectors = tl.arange(0, VECTORS)
    words = tl.arange(0, 4)
    within = 4 * vectors[:, None] + words[None, :]
    piece = tl.program_id(0)
    while piece < num_pieces:
        piece_ptr = pieces_ptr + 3 * piece
        # 4 words x something: so the compiler sees 16-byte accesses.
        pool_ptrs = pool_ptr + 4 * tl.load(piece_ptr) + within
        buffer_ptrs = buffer_ptr + 4 * tl.load(piece_ptr + 1) + within
        length = tl.load(piece_ptr + 2).to(tl.int32)
        first = 0
        while first < length:
            mask = (first + vectors < length)[:, None]
            if IS_GATHER:
                tl.store(buffer_ptrs + 4 * first, tl.load(pool_ptrs + 4 * first, mask), mask)
            else:
                tl.store(pool_ptrs + 4 * first, tl.load(buffer_ptrs + 4 * first, mask), mask)
            first += VECTORS
        piece += tl.num_programs(0)
