"""Quantizes rows to float8_e4m3fn, each with its own scale, for the activations of W8A8 linears.

Shape suffixes: T tokens, E elements of a row.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.row_launch import row_launch


def quantize_fp8(x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q_TE in float8_e4m3fn and float32 scales_T1, with x = q * scale; a row's largest magnitude becomes 448.

    Rows may be strided; their elements are contiguous, at most 16,384. Values must be finite.
    """
    num_tokens, width = x_TE.shape
    assert x_TE.stride(1) == 1, "a row is one span"
    q_TE = torch.empty(x_TE.shape, dtype=torch.float8_e4m3fn, device=x_TE.device)
    scales_T1 = torch.empty((num_tokens, 1), dtype=torch.float32, device=x_TE.device)
    if num_tokens > 0:
        padded, num_warps = row_launch(width)
        _quantize_fp8_kernel[(num_tokens,)](
            x_TE, q_TE, scales_T1, x_TE.stride(0), width, PADDED_E=padded, num_warps=num_warps
        )
    return q_TE, scales_T1


@triton.jit
def _quantize_fp8_kernel(x_ptr, q_ptr, scales_ptr, row_stride, width, PADDED_E: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_E)
    x = tl.load(x_ptr + row * row_stride + columns, columns < width, other=0.0).to(tl.float32)
    store_quantized_row(x, q_ptr, scales_ptr, row, columns, width)


@triton.jit
def store_quantized_row(x, q_ptr, scales_ptr, row, columns, width):  # type: ignore[no-untyped-def]
    """Quantizes and stores a row, for kernels that hold the whole row in float32, with zeros where `columns` >=
    `width`.

    Divisions are rounded as IEEE 754 requires, as in torch. Triton's `/` is off by up to two units, so some elements
    would round differently.
    """
    MAX: tl.constexpr = 448.0
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-12), MAX)
    q = tl.clamp(tl.div_rn(x, scale), -MAX, MAX)
    tl.store(q_ptr + row * width + columns, q.to(q_ptr.dtype.element_ty), columns < width)
    tl.store(scales_ptr + row, scale)
