"""Matrix products by torch, for each kind of weights: numbers, groups, 8-bit floats; knows no layer's meaning.

Shape suffixes: T tokens, I input features, O output features.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.device import gpu_of
from engine.layers.backend import Activations, QuantizedRows
from engine.layers.fp8 import Fp8Weight, quantize_rows
from engine.layers.grouped_weight import GroupedWeight
from engine.quantization_config import FIRST_WITH_FP8

QuantizeRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Converts T x I to 8-bit floats of the same shape, and float32 scales T x 1."""


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


class GroupedLinear:
    """`x_TI @ weight_OI.T + bias_O` in float32, with weights in 4 or 8 bits.

    Every call dequantizes the weights. This saves memory, but no time.
    """

    def __init__(self, weight_OI: GroupedWeight, bias_O: torch.Tensor | None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = None if bias_O is None else bias_O.to(torch.float32)

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor)
        return F.linear(x_TI.to(torch.float32), self._weight_OI.dequantized(), self._bias_O).to(x_TI.dtype)


class Fp8Linear:
    """`x_TI @ weight_OI.T + bias_O` in 8-bit floats; quantizes the given weight if necessary, and does not keep it.

    Each output channel has its own scale. If activations are quantized, each token has its own scale, too. So a large
    channel or token does not reduce the precision of the others. benchmarks/quantization.py measures the loss.

    On GPUs, activations in bfloat16 or float16 are quantized token by token, too. This halves the bytes and
    doubles the arithmetic rate. On CPUs only weights are quantized, and each call converts them back to the
    activations' dtype. This saves memory, but no time.
    """

    def __init__(
        self,
        weight_OI: torch.Tensor | Fp8Weight,
        bias_O: torch.Tensor | None = None,
        quantize: QuantizeRows = quantize_rows,
    ) -> None:
        """`quantize` quantizes activations."""
        self._quantize = quantize
        weight = weight_OI if isinstance(weight_OI, Fp8Weight) else Fp8Weight.quantize(weight_OI)
        self.weight_OI, self.scale_O1 = weight.values_OI, weight.scales_O1
        self.bias_O = bias_O
        self._quantizes_activations = can_multiply_fp8(weight_OI)

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if isinstance(x_TI, QuantizedRows):
            if self._quantizes_activations:
                return self.multiply(x_TI.values_TI, x_TI.scales_T1, x_TI.dtype)
            x_TI = (x_TI.values_TI.to(torch.float32) * x_TI.scales_T1).to(x_TI.dtype)
        assert isinstance(x_TI, torch.Tensor), "rows come normed"
        if self._quantizes_activations:
            return self.multiply(*self._quantize(x_TI), x_TI.dtype)
        # 16-bit formats represent e4m3 exactly, and the product with the float32 scale is rounded only once.
        weight_OI = self.weight_OI.to(x_TI.dtype).mul_(self.scale_O1)
        return F.linear(x_TI, weight_OI, self.bias_O)

    def multiply(self, x_TI: torch.Tensor, scale_T1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The product of activations that are already quantized, as by `quantize_rows`: T x O, in `dtype`.

        Call it only on devices that multiply in 8 bits (`can_multiply_fp8`). torch needs a column-major second
        operand, and float32 scales of shapes T x 1 and 1 x O. The product is computed by cuBLAS (Hopper, CUDA 12.9
        and newer) or CUTLASS. Both support only bfloat16 as the result's type. Hopper's 8-bit units keep partial sums
        with 14 bits (`use_fast_accum`), far more than the 4 bits of the operands. Adding up in float32 registers
        would be slower.
        """
        y_TO = torch._scaled_mm(
            x_TI,
            self.weight_OI.t(),
            scale_a=scale_T1,
            scale_b=self.scale_O1.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        if self.bias_O is not None:
            y_TO += self.bias_O
        return y_TO.to(dtype)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has kernels for this dtype on this machine; otherwise torch's own product is used."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32


def can_multiply_fp8(weight_OI: torch.Tensor | Fp8Weight) -> bool:
    """Whether torch multiplies this shape in 8-bit floats on this device.

    Never for a float32 weight, since the result would be bfloat16.
    """
    is_aligned = weight_OI.shape[0] % 16 == 0 and weight_OI.shape[1] % 16 == 0
    return is_aligned and has_fp8_units(weight_OI.device, weight_OI.dtype)


def has_fp8_units(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies 8-bit floats if activations have this dtype."""
    gpu = gpu_of(device)
    if gpu is None or dtype is torch.float32:
        return False
    return torch.cuda.get_device_capability(gpu) >= FIRST_WITH_FP8
