"""NativeLinear: a matrix product by Baton's own CPU kernels; does not know what a layer means.

Shape suffixes: T tokens, I input features, O output features, P = O / 2.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Self

import torch

from engine.layers.backend import Activations, LinearLayer
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.weight_memory import weight_memory
from engine.native.products import ADD, GATE, NO_CENTRE, STORE, FloatLayer, GroupedLayer, Product, Products
from engine.native.types import TYPE_CODES

GATED_MULTIPLE = 32
"""The number of outputs of `gated` must be a multiple of this number."""
COMPARED_VALUES = 2**20
"""How many float32 weights are compared with 16 bits at a time."""


class NativeLinear:
    """Computes `x_TI @ weight_OI.T + bias_O`.

    Lays out the weights once, here, and does not keep the given weight.

    A row's result depends only on the row, not on the other rows of the step or on the number of threads.
    """

    def __init__(
        self,
        product: Product,
        layer: GroupedLayer | FloatLayer,
        packed: torch.Tensor,
        bias_O: torch.Tensor | None,
    ) -> None:
        self.product = product
        self._layer = layer
        self.layer_address = ctypes.addressof(layer)
        self._packed = packed
        self._bias_O = None if bias_O is None else bias_O.to(torch.float32).contiguous()
        layer.weights = packed.data_ptr()
        layer.bias = None if self._bias_O is None else self._bias_O.data_ptr()
        self.num_outputs: int = layer.num_outputs
        self.num_inputs: int = layer.num_inputs

    @classmethod
    def of_groups(cls, products: Products, weight_OI: GroupedWeight, bias_O: torch.Tensor | None) -> Self:
        """A NativeLinear with weights in 4 or 8 bits. It rounds activations to 8 bits, with one scale for each
        group."""
        w, centre = weight_OI, weight_OI.centre
        has_mins = centre is None
        assert not (has_mins and w.is_e2m1), "every scale of E2M1 has the same zero"
        size = (*w.shape, w.bits, w.group_size)
        # Scales and minima are kept in 16 bits, divided by a power of two that makes the best use of
        # float16's range.
        kept = [w.scales_OG, w.mins_OG] if has_mins else [w.scales_OG]
        largest = max(per_group_OG.abs().max().item() for per_group_OG in kept)
        factor = 2.0 ** (math.frexp(largest)[1] - 15)
        values_OI = w.values_OI.contiguous()
        halves = [(per_group_OG / factor).to(torch.float16).contiguous() for per_group_OG in kept]
        mins_address = halves[1].data_ptr() if has_mins else None
        packed = weight_memory(products.grouped_packed_bytes(*size, has_mins))
        products.grouped_pack(
            *(values_OI.data_ptr(), halves[0].data_ptr(), mins_address),
            *(*size, packed.data_ptr(), torch.get_num_threads()),
        )
        layer = GroupedLayer(None, None, *size, w.is_e2m1, NO_CENTRE if centre is None else centre, factor)
        return cls(products.grouped_product, layer, packed, bias_O)

    @classmethod
    def of_floats(cls, products: Products, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Self:
        """A NativeLinear with weights in 32 or 16 bits.

        Float32 weights that fit into 16 bits exactly, as in most checkpoints, are kept in 16 bits. The
        results are equal, with half the memory traffic. Bfloat16 weights are multiplied by the processor's
        bfloat16 units, if it has any.
        """
        by_units = weight_OI.dtype is torch.bfloat16 and products.has_bfloat16_units
        weight_OI = shortened(weight_OI).contiguous()
        size = (*weight_OI.shape, TYPE_CODES[weight_OI.dtype])
        packed = weight_memory(products.float_packed_bytes(*size))
        products.float_pack(weight_OI.data_ptr(), *size, packed.data_ptr(), torch.get_num_threads())
        return cls(products.float_product, FloatLayer(None, None, *size, by_units), packed, bias_O)

    @property
    def can_gate(self) -> bool:
        """Whether `gated` supports this number of outputs."""
        return self.num_outputs % (2 * GATED_MULTIPLE) == 0

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        assert isinstance(x_TI, torch.Tensor), "8-bit activations are for 8-bit products"
        y_TO = x_TI.new_empty(len(x_TI), self.num_outputs)
        self.store(x_TI, y_TO)
        return y_TO

    def store(self, x_TI: Activations, y_TO: torch.Tensor) -> None:
        """Writes the product to `y_TO`."""
        self._multiply(x_TI, y_TO, STORE)

    def add_(self, y_TO: torch.Tensor, x_TI: Activations) -> None:
        """Adds the product in place."""
        self._multiply(x_TI, y_TO, ADD)

    def gated(self, x_TI: Activations, y_TP: torch.Tensor) -> None:
        """Writes to `y_TP` silu of the first P outputs, times the other P outputs."""
        self._multiply(x_TI, y_TP, GATE)

    def _multiply(self, x_TI: Activations, y_TO: torch.Tensor, epilogue: int) -> None:
        assert isinstance(x_TI, torch.Tensor), "8-bit activations are for 8-bit products"
        assert x_TI.shape[1] == self.num_inputs
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        self.product.one(
            *(self.layer_address, x_TI.data_ptr(), x_TI.stride(0), TYPE_CODES[x_TI.dtype]),
            *(y_TO.data_ptr(), y_TO.stride(0), TYPE_CODES[y_TO.dtype]),
            *(len(x_TI), epilogue, torch.get_num_threads()),
        )


class NativeLinears:
    """Layers of equal shape, such as those of experts. One call computes all layers, each with its own rows.

    Suffixes: N layers, P rows of all layers.
    """

    def __init__(self, layers: Sequence[NativeLinear]) -> None:
        first = layers[0]
        self._layers = layers
        self._many = first.product.many
        self._addresses = (ctypes.c_void_p * len(layers))(*(layer.layer_address for layer in layers))
        self.num_outputs, self.num_inputs, self.can_gate = first.num_outputs, first.num_inputs, first.can_gate

    @classmethod
    def joined(cls, layers: Sequence[LinearLayer]) -> Self | None:
        """These layers together; None if one call cannot compute all their products."""
        native = [layer for layer in layers if isinstance(layer, NativeLinear)]
        kinds = [(layer.product, layer.num_outputs, layer.num_inputs) for layer in native]
        return cls(native) if len(native) == len(layers) and all(kind == kinds[0] for kind in kinds) else None

    def store(
        self, x_TI: torch.Tensor, firsts_N: torch.Tensor, order_P: torch.Tensor | None, y_PO: torch.Tensor
    ) -> None:
        """Writes the products to `y_PO`: layer n computes the rows from firsts_N[n] to firsts_N[n + 1].

        `order_P`: for each of these rows, its row in `x_TI`; None: the same row. `firsts_N` and `order_P` are int64."""
        self._multiply(x_TI, firsts_N, order_P, y_PO, STORE)

    def gated(
        self, x_TI: torch.Tensor, firsts_N: torch.Tensor, order_P: torch.Tensor | None, y_PO: torch.Tensor
    ) -> None:
        """Like `store`, with the epilogue of `NativeLinear.gated`."""
        self._multiply(x_TI, firsts_N, order_P, y_PO, GATE)

    def _multiply(
        self,
        x_TI: torch.Tensor,
        firsts_N: torch.Tensor,
        order_P: torch.Tensor | None,
        y_PO: torch.Tensor,
        epilogue: int,
    ) -> None:
        assert x_TI.shape[1] == self.num_inputs
        assert x_TI.stride(1) == 1
        assert len(firsts_N) == len(self._layers) + 1
        assert all(
            numbers.dtype is torch.int64 and numbers.is_contiguous()
            for numbers in (firsts_N, order_P)
            if numbers is not None
        )
        self._many(
            *(self._addresses, firsts_N.data_ptr(), len(self._layers)),
            *(x_TI.data_ptr(), x_TI.stride(0), TYPE_CODES[x_TI.dtype]),
            None if order_P is None else order_P.data_ptr(),
            *(y_PO.data_ptr(), y_PO.stride(0), TYPE_CODES[y_PO.dtype]),
            *(epilogue, torch.get_num_threads()),
        )


def shortened(weight_OI: torch.Tensor) -> torch.Tensor:
    """The same values in a 16-bit type, if one can represent all of them exactly; else the given weight.

    Compares a few rows at a time: a copy of a projection to logits in float32 may take a third of all weights' bytes.
    """
    if weight_OI.dtype is torch.float32:
        parts = weight_OI.split(max(1, COMPARED_VALUES // weight_OI.shape[1]))
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(part.to(dtype).to(torch.float32), part) for part in parts):
                return weight_OI.to(dtype)
    return weight_OI
