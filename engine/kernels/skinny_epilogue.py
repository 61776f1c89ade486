"""Operands of products of few rows, and what happens to the products before they are stored.

Shape suffixes: T tokens, P pairs.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class InputNorm:
    """RMSNorm of a product's input rows."""

    weight_I: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of one product; see `skinny_linear`."""

    x_TI: torch.Tensor
    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    scales_O: torch.Tensor | None
    y_TO: torch.Tensor
    """O output features; half as many if the product is gated."""
    norm: InputNorm | None = None
    is_gated: bool = False
    """y = silu(first half) * second half."""
    is_added: bool = False
    """y += the product."""


@triton.jit
def weight_row(index, num_outputs, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of the weight that is row `index` of a tile, counted from the tile's first output.

    A gated tile alternates between gates and the outputs that they scale, so that pairs are neighbours. In the weight,
    all gates come first.
    """
    if GATED:
        return index // 2 + index % 2 * num_outputs
    else:
        return index


@triton.jit
def gate_mul_pairs(y):  # type: ignore[no-untyped-def]
    """silu(gate) * up for pairs of a gate and an up: [T, P, 2] to [T, P] in float32.

    `y` is already rounded to the dtype of the output, so the result is the same as that of gate_mul.py.
    """
    gate, up = tl.split(y)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up
