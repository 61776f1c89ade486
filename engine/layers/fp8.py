"""8-bit floats for weights, activations and KV; knows no layer.

float8_e4m3fn: 1 bit of sign, 4 of exponent, 3 of mantissa; see FP8 Formats for Deep Learning (Micikevicius et al.,
2022).

Shape suffixes: T rows, I columns.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest value of FP8, which has no infinity. Larger values become NaN on some devices, so values are clamped."""
MIN_MAGNITUDE = 1e-12
"""Stands for the largest value of a row of zeros, so that its scale is not 0."""


def saturate(x: torch.Tensor) -> torch.Tensor:
    """The nearest 8-bit floats, without a scale, clamped to +-448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_rows(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x_TI = quantized_TI x scale_T1, as nearly as 8 bits can: each row's largest value becomes 448.

    Scales are float32. Bit for bit the same as engine/kernels/quantize_fp8.py, on every device. It divides by a tensor:
    on a GPU torch multiplies by the reciprocal of a Python number, which is off by a unit in many rows.
    """
    largest_T1 = x_TI.abs().amax(-1, keepdim=True).to(torch.float32).clamp_(min=MIN_MAGNITUDE)
    scale_T1 = largest_T1.div_(torch.full_like(largest_T1, FP8_MAX))
    return saturate(x_TI / scale_T1), scale_T1


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, whose rows torch can index on every device; any other tensor unchanged."""
    return x.view(torch.uint8) if x.dtype is FP8 else x
