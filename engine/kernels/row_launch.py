"""Launch parameters of kernels whose programs hold a whole row in registers."""

import triton

MAX_WIDTH = 16_384
"""The longest row: 32 elements in each of 512 threads; a longer row would be spilled to local memory."""


def row_launch(width: int) -> tuple[int, int]:
    """Padded width (a power of two) and warps for rows of `width` elements.

    A thread has 8 elements (one 16-byte load of 16-bit numbers), or more if 16 warps are not enough. A decode step
    has few rows, and more threads keep more bytes of a row in flight. With more than 16 warps, the reduction across
    warps and the coarser occupancy cost more than they save.
    """
    assert 0 < width <= MAX_WIDTH, f"a row of {width} elements does not fit one program"
    padded = triton.next_power_of_2(width)
    return padded, min(16, max(1, padded // 256))
