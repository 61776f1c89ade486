"""FewRows: a projection for steps of few tokens, fused with the operations before or after it.

Shape suffixes: T tokens, I input features, O output features, P = O / 2.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from dataclasses import dataclass

import torch

from engine.kernels.rms_norm import rms_norm
from engine.kernels.skinny_epilogue import InputNorm
from engine.kernels.skinny_linear import MAX_TOKENS, norms_input, skinny_add_, skinny_linear, skinny_silu_mul
from engine.layers.backend import Activations, UnnormedRows

NUM_ROWS = (1, 2, 4, MAX_TOKENS)
"""Numbers of rows that have their own kernel; other numbers use the kernel of the next larger number."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A projection computed by Baton's own kernels (engine/kernels/skinny_linear.py)."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    scales_O: torch.Tensor | None
    """Scales of 8-bit weights."""

    def takes(self, x_TI: Activations) -> bool:
        """Whether kernels support `x_TI`: at most 16 rows, not in 8 bits, no float32 for 8-bit weights."""
        rows_TI = x_TI.rows_TE if isinstance(x_TI, UnnormedRows) else x_TI
        if not isinstance(rows_TI, torch.Tensor) or len(rows_TI) > MAX_TOKENS:
            return False
        return self.scales_O is None or rows_TI.dtype is not torch.float32

    def product(self, x_TI: Activations) -> torch.Tensor:
        """T x O."""
        rows_TI, norm = self._input(x_TI)
        return skinny_linear(rows_TI, self.weight_OI, self.bias_O, self.scales_O, norm=norm)

    def gated(self, x_TI: Activations) -> torch.Tensor:
        """T x P: silu of the first P outputs, times the other P."""
        rows_TI, norm = self._input(x_TI)
        return skinny_silu_mul(rows_TI, self.weight_OI, self.bias_O, self.scales_O, norm=norm)

    def add_(self, y_TO: torch.Tensor, x_TI: Activations) -> None:
        """Adds the product in place."""
        skinny_add_(y_TO, normed(x_TI), self.weight_OI, self.bias_O, self.scales_O)

    def _input(self, x_TI: Activations) -> tuple[torch.Tensor, InputNorm | None]:
        num_inputs, weight_bytes = self.weight_OI.shape[1], self.weight_OI.dtype.itemsize
        if isinstance(x_TI, UnnormedRows) and norms_input(len(x_TI.rows_TE), num_inputs, weight_bytes):
            return x_TI.rows_TE, InputNorm(x_TI.weight_E, x_TI.eps)
        return normed(x_TI), None


def normed(x_TI: Activations) -> torch.Tensor:
    """The rows, normed by a separate launch if they are not normed yet. They must not be in 8 bits."""
    if isinstance(x_TI, UnnormedRows):
        return rms_norm(x_TI.rows_TE, x_TI.weight_E, x_TI.eps)
    assert isinstance(x_TI, torch.Tensor), "8-bit activations are for 8-bit products"
    return x_TI
