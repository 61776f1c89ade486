"""Matrix products on a GPU: by Baton's own kernels for few tokens, by torch's library for many.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch

from engine.kernels.quantize_fp8 import quantize_fp8
from engine.kernels.row_launch import MAX_WIDTH
from engine.kernels.switches import kernel_switches
from engine.layers.backend import Activations, QuantizedRows
from engine.layers.few_rows import FewRows, normed
from engine.layers.fp8 import Fp8Weight, quantize_rows
from engine.layers.linear import Fp8Linear
from engine.layers.timed_products import TimedProducts, by_library


class TritonLinear:
    """`x_TI @ weight_OI.T + bias_O`. torch's library also computes few rows if it was timed to be faster."""

    def __init__(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, timed_products: TimedProducts | None
    ) -> None:
        """`timed_products`: None for a product that must be the same on every rank: it is not timed."""
        self.few_rows = FewRows(weight_OI.contiguous(), bias_O, None)
        self._timed = None if timed_products is None else timed_products.add(self.few_rows)

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if self.few_rows.takes(x_TI) and not self._is_by_library(x_TI):
            return self.few_rows.product(x_TI)
        return by_library(self.few_rows, normed(x_TI))

    def _is_by_library(self, x_TI: Activations) -> bool:
        """Whether torch's library was faster.

        False for a product that is fused with a norm: this saves a launch.
        """
        if self._timed is None or not kernel_switches().timed_products:
            return False
        return isinstance(x_TI, torch.Tensor) and self._timed.are_by_library(len(x_TI))


class TritonFp8Linear:
    """The same with 8-bit weights; see Fp8Linear.

    If there are few tokens, their activations are not quantised: reading the weights takes the same time, and
    the result is more precise."""

    def __init__(self, weight_OI: torch.Tensor | Fp8Weight, bias_O: torch.Tensor | None = None) -> None:
        is_narrow = weight_OI.shape[1] <= MAX_WIDTH  # a program holds a whole row
        self._linear = Fp8Linear(weight_OI, bias_O, quantize_fp8 if is_narrow else quantize_rows)
        self.few_rows = FewRows(self._linear.weight_OI, self._linear.bias_O, self._linear.scale_O1.view(-1))

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if self.few_rows.takes(x_TI):
            return self.few_rows.product(x_TI)
        return self._linear(x_TI if isinstance(x_TI, QuantizedRows) else normed(x_TI))
