"""TimedProducts: finds products of few rows that torch computes faster than Baton's kernels; has no clock.

Shape suffixes: T tokens, I input features, O output features.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.layers.few_rows import NUM_ROWS, FewRows

logger = logging.getLogger(__name__)

Work = Callable[[], torch.Tensor]
Timer = Callable[[Sequence[Work]], float]
"""Returns how many seconds a device needs for all works, one after another."""

MIN_GAIN = 0.1
"""The least share of time that torch must save. A smaller gain could lead to different choices at each
start."""


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
        """Times the noted numbers of rows that have no choice yet, on the weights of all layers in turn."""
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
            "products of %d rows, %d x %d: %.1f us by our kernel, %.1f us by torch's library, which %s",
            num_rows,
            num_inputs,
            num_outputs,
            1e6 * ours_s / len(self._layers),
            1e6 * librarys_s / len(self._layers),
            "computes them" if is_faster else "does not compute them",
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

        A second call times only numbers noted since the first.
        """
        for products in self._shapes.values():
            products.choose(timer)


def by_library(few_rows: FewRows, x_TI: torch.Tensor) -> torch.Tensor:
    """The product by torch: T x O."""
    return F.linear(x_TI, few_rows.weight_OI, few_rows.bias_O)
