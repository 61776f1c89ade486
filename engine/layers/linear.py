"""Linear: a matrix product with weights laid out once for the device; does not know what a layer means.

Shape suffixes: T tokens, I input features, O output features.
"""

import torch
import torch.nn.functional as F

from engine.layers.backend import Activations


class Linear:
    """`x_TI @ weight_OI.T + bias_O`.

    On a CPU, oneDNN needs weights in its own blocked layout. It would reorder other weights on every call,
    which takes as long as the product itself in a decode step (see benchmarks/cpu_engine.py). So the weights
    are reordered once, here, and the given weight is not kept.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self._bias_O = bias_O
        self._is_packed = can_pack(weight_OI)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI, None) if self._is_packed else weight_OI
        )

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor), "8-bit activations are for 8-bit products"
        if not self._is_packed:
            return F.linear(x_TI, self._weight, self._bias_O)
        y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TI, self._weight, self._bias_O, "none", [], ""
        )
        return y_TO


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has kernels for this dtype on this machine; otherwise torch's own product is used."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32
