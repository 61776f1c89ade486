"""merged_linear: projections of one input as one layer; does not know what a projection means.

Shape suffixes: T tokens, I input features, O output features.
"""

from collections.abc import Sequence

import torch

from engine.layers.backend import Activations, LinearLayer, MakeLinear, Matrix
from engine.layers.fp8 import Fp8Weight
from engine.layers.grouped_weight import GroupedWeight


def merged_linear(
    linear: MakeLinear, parts: Sequence[Matrix], biases: Sequence[torch.Tensor] | None
) -> LinearLayer:
    """One layer with the outputs of all parts, in order; a single product if all parts have the same kind."""
    bias_O = None if biases is None else _joined(biases)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return linear(_joined(tensors), bias_O)
    groups = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(groups) == len(parts) and len({part.kind for part in groups}) == 1:
        return linear(GroupedWeight.concatenated(groups), bias_O)
    floats = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(floats) == len(parts):
        return linear(Fp8Weight.concatenated(floats), bias_O)
    if floats:  # kernels can only fuse the operation that follows a single product
        return merged_linear(linear, [_numbers(part) for part in parts], biases)
    own_biases = [None] * len(parts) if biases is None else biases
    return SideBySide([linear(part, bias) for part, bias in zip(parts, own_biases, strict=True)])


class SideBySide:
    """Projections whose weights are of different kinds, as in a GGUF file that keeps v in more bits than q and k."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self.layers = layers

    def __call__(self, x_TI: Activations) -> torch.Tensor:
        return torch.cat([layer(x_TI) for layer in self.layers], -1)


def parts_of(layer: LinearLayer) -> Sequence[LinearLayer]:
    """The layers whose outputs follow each other: those of SideBySide, or the layer itself."""
    return layer.layers if isinstance(layer, SideBySide) else (layer,)


def _numbers(part: Matrix) -> Matrix:
    return part.dequantized() if isinstance(part, Fp8Weight) else part


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the output features."""
    first = parts[0]
    if first.is_meta:
        # To find the shape, PyTorch would import its compiler, which takes a second at each start of a
        # worker.
        return first.new_empty(sum(len(part) for part in parts), *first.shape[1:])
    return torch.cat(list(parts))
