"""8-bit floats as weights, activations and KV are stored in them; knows no layer.

float8_e4m3fn: 1 bit of sign, 4 of exponent, 3 of mantissa; see FP8 Formats for Deep Learning (Micikevicius et al.,
2022).

Shape suffixes: T rows, I columns.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Its largest value. It has no infinity: what is beyond becomes NaN on some devices, so everything is clamped first."""
MIN_MAGNITUDE = 1e-12
"""What a row of zeros counts as, so that its scale divides."""


def saturate(x: torch.Tensor) -> torch.Tensor:
    """The nearest 8-bit floats, without a scale; what is beyond +-448 becomes that."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_rows(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x_TI = quantized_TI x scale_T1, as nearly as 8 bits can: each row's largest value becomes 448.

    Scales are float32. Bit for bit what engine/kernels/quantize_fp8.py gives, on every device: its reference says why
    this divides by a tensor.
    """
    largest_T1 = x_TI.abs().amax(-1, keepdim=True).to(torch.float32).clamp_(min=MIN_MAGNITUDE)
    scale_T1 = largest_T1.div_(torch.full_like(largest_T1, FP8_MAX))
    return saturate(x_TI / scale_T1), scale_T1


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, whose rows torch can move by index on every device; any other tensor as it is."""
    return x.view(torch.uint8) if x.dtype is FP8 else x
