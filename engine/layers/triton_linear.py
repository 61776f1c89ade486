"""Matrix products on a GPU: by kernels of our own where a step has few tokens, by torch's library where it has many.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch
import torch.nn.functional as F

from engine.kernels.quantize_fp8 import quantize_fp8
from engine.kernels.row_launch import MAX_WIDTH
from engine.layers.backend import Activations, QuantizedRows
from engine.layers.few_rows import FewRows, normed
from engine.layers.fp8 import quantize_rows
from engine.layers.fp8_linear import Fp8Linear


class TritonLinear:
    """`x_TI @ weight_OI.T + bias_O`."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self.few_rows = FewRows(weight_OI.contiguous(), bias_O, None)

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if self.few_rows.takes(x_TI):
            return self.few_rows.product(x_TI)
        return F.linear(normed(x_TI), self.few_rows.weight_OI, self.few_rows.bias_O)


class TritonFp8Linear:
    """The same with 8-bit weights; see Fp8Linear. Few tokens are multiplied as they are, unrounded: what is read of the
    weights takes the same time then, and it is more precise."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        is_narrow = weight_OI.shape[1] <= MAX_WIDTH  # the kernel holds a row at once
        self._linear = Fp8Linear(weight_OI, bias_O, quantize_fp8 if is_narrow else quantize_rows)
        self.few_rows = FewRows(self._linear.weight_OI, self._linear.bias_O, self._linear.scale_O1.view(-1))

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if self.few_rows.takes(x_TI):
            return self.few_rows.product(x_TI)
        return self._linear(x_TI if isinstance(x_TI, QuantizedRows) else normed(x_TI))
