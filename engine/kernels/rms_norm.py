"""RMSNorm (Zhang and Sennrich, 2019), fused with the residual addition before it or the quantization after it.

Shape suffixes: T tokens, E hidden size.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.quantize_fp8 import store_quantized_row
from engine.kernels.row_launch import row_launch


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row, T x E in x's dtype; computed in float32, rounded once.

    Rows of every tensor here may be strided; their elements are contiguous. E is at most 16,384.
    """
    normed_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    _launch(x_TE, None, weight_E, eps, normed_TE, None)
    return normed_TE


def add_rms_norm_(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, rounded to its dtype; returns `rms_norm` of the new residual."""
    normed_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    _launch(x_TE, residual_TE, weight_E, eps, normed_TE, None)
    return normed_TE


def add_rms_norm_fp8_(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place, rounded to its dtype; returns its norm, quantized as by `quantize_fp8`.

    The norm is not rounded to x's dtype in between. Returns q_TE and scales_T1.
    """
    q_TE = torch.empty(x_TE.shape, dtype=torch.float8_e4m3fn, device=x_TE.device)
    scales_T1 = torch.empty((len(x_TE), 1), dtype=torch.float32, device=x_TE.device)
    _launch(x_TE, residual_TE, weight_E, eps, q_TE, scales_T1)
    return q_TE, scales_T1


def _launch(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out_TE: torch.Tensor,
    scales_T1: torch.Tensor | None,
) -> None:
    num_tokens, width = x_TE.shape
    assert x_TE.stride(1) == 1, "a row is one span"
    assert weight_E.shape == (width,), f"{tuple(weight_E.shape)} weights for rows of {width}"
    assert weight_E.is_contiguous()
    if residual_TE is not None:
        assert residual_TE.shape == x_TE.shape
        assert residual_TE.stride(1) == 1, "a row is one span"
    if num_tokens == 0:
        return
    padded, num_warps = row_launch(width)
    _rms_norm_kernel[(num_tokens,)](
        x_TE,
        residual_TE,
        weight_E,
        out_TE,
        scales_T1,
        x_TE.stride(0),
        0 if residual_TE is None else residual_TE.stride(0),
        width,
        eps,
        PADDED_E=padded,
        num_warps=num_warps,
        **launch_options(),
    )


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    width,
    eps,
    PADDED_E: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_E)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask, other=0.0)  # before the wait: no kernel writes it
    wait_for_former(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + row * residual_stride + columns
        residual = tl.load(residual_ptrs, mask, other=0.0)
        rounded = (residual.to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, rounded, mask)
        x = rounded.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight.to(tl.float32)
    if scales_ptr is not None:
        store_quantized_row(normed, out_ptr, scales_ptr, row, columns, width)
    else:
        tl.store(out_ptr + row * width + columns, normed.to(out_ptr.dtype.element_ty), mask)
