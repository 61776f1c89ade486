"""8-bit floats for weights, activations and KV; knows no layer.

float8_e4m3fn: 1 bit of sign, 4 of exponent, 3 of mantissa; see FP8 Formats for Deep Learning (Micikevicius et al.,
2022).

Shape suffixes: T rows, I columns, O output features.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest value of FP8, which has no infinity. Values are clamped, since larger ones become NaN on some
devices."""
MIN_MAGNITUDE = 1e-12
"""Replaces the largest value of a row of zeros, so that the row's scale is not 0."""


def saturate(x: torch.Tensor) -> torch.Tensor:
    """The nearest 8-bit floats, without a scale, clamped to +-448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_rows(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns quantized_TI and scale_T1 with x_TI close to quantized_TI x scale_T1.

    The largest magnitude of each row becomes 448. Scales are float32. The result is the same, bit for bit, as that of
    engine/kernels/quantize_fp8.py, on every device. For this, the code divides by a tensor: on a GPU, torch would
    multiply by the reciprocal of a Python number, which is off by one unit in many rows.
    """
    largest_T1 = x_TI.abs().amax(-1, keepdim=True).to(torch.float32).clamp_(min=MIN_MAGNITUDE)
    scale_T1 = largest_T1.div_(torch.full_like(largest_T1, FP8_MAX))
    return saturate(x_TI / scale_T1), scale_T1


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, since torch can index rows of uint8 on every device; other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """weight = value x scale, with a scale for each output."""

    values_OI: torch.Tensor
    """FP8."""
    scales_O1: torch.Tensor
    """float32."""
    dtype: torch.dtype
    """The dtype of the activations that are multiplied with the weight."""

    def __post_init__(self) -> None:
        assert self.values_OI.dtype is FP8
        assert self.scales_O1.dtype is torch.float32
        assert self.scales_O1.shape == (len(self.values_OI), 1), self.scales_O1.shape

    @classmethod
    def quantize(cls, weight_OI: torch.Tensor) -> Self:
        """Rounds a weight to the nearest 8-bit values."""
        return cls(*quantize_rows(weight_OI), weight_OI.dtype)

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the outputs of parts that have the same inputs."""
        values_OI = torch.cat([as_bytes(part.values_OI) for part in parts]).view(FP8)
        return cls(values_OI, torch.cat([part.scales_O1 for part in parts]), parts[0].dtype)

    @property
    def shape(self) -> torch.Size:
        """O x I."""
        return self.values_OI.shape

    @property
    def device(self) -> torch.device:
        return self.values_OI.device

    def dequantized(self) -> torch.Tensor:
        """O x I, in the activations' dtype."""
        return (self.values_OI.to(torch.float32) * self.scales_O1).to(self.dtype)

    def outputs(self, index: slice | torch.Tensor) -> Self:
        """The weight's outputs (rows) that `index` selects: a slice or a tensor of indices."""
        index = index.to(self.device) if isinstance(index, torch.Tensor) else index
        values_OI = as_bytes(self.values_OI)[index].view(FP8)
        return replace(self, values_OI=values_OI, scales_O1=self.scales_O1[index])
