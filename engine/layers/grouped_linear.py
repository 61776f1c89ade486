"""GroupedLinear: a matrix product with weights in 4 or 8 bits, by torch; does not know what a layer means.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch
import torch.nn.functional as F

from engine.layers.backend import Activations
from engine.layers.grouped_weight import GroupedWeight


class GroupedLinear:
    """`x_TI @ weight_OI.T + bias_O` in float32.

    Every call dequantises the weights. This saves memory, but no time.
    """

    def __init__(self, weight_OI: GroupedWeight, bias_O: torch.Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = None if bias_O is None else bias_O.to(torch.float32)

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor)
        return F.linear(x_TI.to(torch.float32), self._weight_OI.dequantized(), self._bias_O).to(x_TI.dtype)
