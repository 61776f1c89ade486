"""Matrix products on a GPU: by Baton's own kernels for few tokens, by torch's library for many; has no clock.

Among the products of few tokens, TimedProducts finds those that torch's library computes faster.

Shape suffixes: T tokens, I input features, O output features, P = O / 2.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from engine.kernels.quantize_fp8 import quantize_fp8
from engine.kernels.rms_norm import rms_norm
from engine.kernels.row_launch import MAX_WIDTH
from engine.kernels.skinny_epilogue import InputNorm
from engine.kernels.skinny_linear import MAX_TOKENS, norms_input, skinny_add_, skinny_gate_mul, skinny_linear
from engine.kernels.switches import kernel_switches
from engine.layers.backend import Activations, QuantizedRows, UnnormedRows
from engine.layers.fp8 import Fp8Weight, quantize_rows
from engine.layers.linear import Fp8Linear

logger = logging.getLogger(__name__)

NUM_ROWS = (1, 2, 4, MAX_TOKENS)
"""Numbers of rows that have their own kernel; other numbers use the kernel of the next larger number."""
Work = Callable[[], torch.Tensor]
Timer = Callable[[Sequence[Work]], float]
"""Returns how many seconds a device needs for all works, one after another."""

MIN_GAIN = 0.1
"""The least share of time that torch's library must save to be chosen. A smaller gain could lead to different choices
at each start."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """A projection computed by Baton's own kernels (engine/kernels/skinny_linear.py)."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    scales_O: torch.Tensor | None
    """Scales of 8-bit weights."""

    def supports(self, x_TI: Activations) -> bool:
        """Whether kernels support `x_TI`: it has at most 16 rows, is not in 8 bits, and is not float32 if the weights
        have 8 bits."""
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
        return skinny_gate_mul(rows_TI, self.weight_OI, self.bias_O, self.scales_O, norm=norm)

    def add_(self, y_TO: torch.Tensor, x_TI: Activations) -> None:
        """Adds the product in place."""
        skinny_add_(y_TO, normed(x_TI), self.weight_OI, self.bias_O, self.scales_O)

    def _input(self, x_TI: Activations) -> tuple[torch.Tensor, InputNorm | None]:
        num_inputs, weight_bytes = self.weight_OI.shape[1], self.weight_OI.dtype.itemsize
        if isinstance(x_TI, UnnormedRows) and norms_input(len(x_TI.rows_TE), num_inputs, weight_bytes):
            return x_TI.rows_TE, InputNorm(x_TI.weight_E, x_TI.eps)
        return normed(x_TI), None


class ProductsOfShape:
    """The weights of all layers with one shape, dtype and kind, and whether torch multiplies them."""

    def __init__(self) -> None:
        self._layers: list[FewRows] = []
        self._by_library: dict[int, bool | None] = {}
        """Whether torch multiplies this number of rows; None: the number is used, but not timed yet."""

    def add(self, few_rows: FewRows) -> None:
        self._layers.append(few_rows)

    def are_by_library(self, num_rows: int) -> bool:
        """Whether torch's library multiplies `num_rows` rows (at most 16).

        Returns False before `choose`, and notes the number of rows: `choose` times all noted numbers.
        """
        rows = NUM_ROWS[bisect_left(NUM_ROWS, num_rows)]
        return bool(self._by_library.setdefault(rows, None))

    def choose(self, timer: Timer) -> None:
        """Chooses the faster product for each noted number of rows that has no choice yet. Times the products with the
        weights of all layers."""
        for num_rows, choice in self._by_library.items():
            if choice is None:
                self._by_library[num_rows] = self._is_library_faster(num_rows, timer)

    def _is_library_faster(self, num_rows: int, timer: Timer) -> bool:
        weight_OI = self._layers[0].weight_OI
        num_outputs, num_inputs = weight_OI.shape
        x_TI = torch.randn(num_rows, num_inputs, dtype=weight_OI.dtype, device=weight_OI.device)
        ours_s = timer([partial(layer.product, x_TI) for layer in self._layers])
        librarys_s = timer([partial(by_library, layer, x_TI) for layer in self._layers])
        is_faster = librarys_s < (1 - MIN_GAIN) * ours_s
        logger.info(
            "products of %d rows, %d x %d: %.1f us by Baton's kernel, %.1f us by torch's library; Baton will use %s",
            num_rows,
            num_inputs,
            num_outputs,
            1e6 * ours_s / len(self._layers),
            1e6 * librarys_s / len(self._layers),
            "torch's library" if is_faster else "Baton's kernel",
        )
        return is_faster


class TimedProducts:
    """The products of a model's layers with weights in 16 or 32 bits."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[torch.Size, torch.dtype, bool], ProductsOfShape] = {}

    def add(self, few_rows: FewRows) -> ProductsOfShape:
        """Adds a layer to the products of its shape, and returns these products."""
        weight_OI = few_rows.weight_OI
        key = (weight_OI.shape, weight_OI.dtype, few_rows.bias_O is not None)
        products = self._shapes.setdefault(key, ProductsOfShape())
        products.add(few_rows)
        return products

    def choose(self, timer: Timer) -> None:
        """Calls `ProductsOfShape.choose` for all shapes.

        A second call times only the numbers of rows that were noted since the first call.
        """
        for products in self._shapes.values():
            products.choose(timer)


class TritonLinear:
    """`x_TI @ weight_OI.T + bias_O`. torch's library computes few rows only if it was measured to be faster."""

    def __init__(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, timed_products: TimedProducts | None
    ) -> None:
        """`timed_products`: None for a product that must be the same on every rank. Such a product is not timed."""
        self.few_rows = FewRows(weight_OI.contiguous(), bias_O, None)
        self._timed = None if timed_products is None else timed_products.add(self.few_rows)

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if self.few_rows.supports(x_TI) and not self._is_by_library(x_TI):
            return self.few_rows.product(x_TI)
        return by_library(self.few_rows, normed(x_TI))

    def _is_by_library(self, x_TI: Activations) -> bool:
        """Whether torch's library was faster.

        Always false for a product that is fused with a norm, since fusing saves a launch.
        """
        if self._timed is None or not kernel_switches().timed_products:
            return False
        return isinstance(x_TI, torch.Tensor) and self._timed.are_by_library(len(x_TI))


class TritonFp8Linear:
    """`x_TI @ weight_OI.T + bias_O` with 8-bit weights; see Fp8Linear.

    If there are few tokens, their activations are not quantized: reading the weights takes the same time, and
    the result is more precise."""

    def __init__(self, weight_OI: torch.Tensor | Fp8Weight, bias_O: torch.Tensor | None) -> None:
        is_narrow = weight_OI.shape[1] <= MAX_WIDTH  # a program holds a whole row
        self._linear = Fp8Linear(weight_OI, bias_O, quantize_fp8 if is_narrow else quantize_rows)
        self.few_rows = FewRows(self._linear.weight_OI, self._linear.bias_O, self._linear.scale_O1.view(-1))

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        if self.few_rows.supports(x_TI):
            return self.few_rows.product(x_TI)
        return self._linear(x_TI if isinstance(x_TI, QuantizedRows) else normed(x_TI))


def by_library(few_rows: FewRows, x_TI: torch.Tensor) -> torch.Tensor:
    """The product by torch: T x O."""
    return F.linear(x_TI, few_rows.weight_OI, few_rows.bias_O)


def normed(x_TI: Activations) -> torch.Tensor:
    """The rows, normed by a separate launch if they are not normed yet. They must not be in 8 bits."""
    if isinstance(x_TI, UnnormedRows):
        return rms_norm(x_TI.rows_TE, x_TI.weight_E, x_TI.eps)
    assert isinstance(x_TI, torch.Tensor), "8-bit activations are for 8-bit products"
    return x_TI
