"""NativeMixture: a mixture of experts by Baton's own CPU kernels, all experts in one call; knows no checkpoint.

Shape suffixes: T tokens, X experts, P pairs of a token and one of its experts, E hidden size, I intermediate size of an
expert, M = 2 x I.
"""

from collections.abc import Sequence

import torch

from engine.activation import Activation, Gate
from engine.layers.mixture import ExpertChoice, sorted_pairs
from engine.layers.native_linear import NativeLinears
from engine.layers.workspace import Workspace
from engine.native.elementwise import ElementwiseKernels


class NativeMixture:
    """A `MixtureLayer` of engine/layers/backend.py, which computes all experts in one call.

    Each pair's result has the same bits as in `LoopedMixture` with the same layers. The sums over pairs may differ
    from those of LoopedMixture in the last bit: here, each added pair is rounded once, in torch twice.
    """

    def __init__(
        self,
        choice: ExpertChoice,
        gate_ups: Sequence[NativeLinears],
        downs: NativeLinears,
        activation: Activation,
        kernels: ElementwiseKernels,
        products: Workspace,
        activations: Workspace,
        own_experts: range,
    ) -> None:
        """`gate_ups`, `downs`: the projections of the experts with the numbers `own_experts`. `gate_ups` may have
        several parts, whose outputs follow each other.

        `products`, `activations`: memory for the products and for the activations."""
        self._choice = choice
        self._gate_ups, self._downs = gate_ups, downs
        self._activation = activation
        self._kernels = kernels
        self._products, self._activations = products, activations
        self._own_experts = own_experts

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        pairs = sorted_pairs(*self._choice(x_TE), self._own_experts)
        x_PI = self._gated(x_TE, pairs.firsts_X, pairs.tokens_P)
        y_PE = self._products.borrow(x_TE.dtype, len(x_PI), x_TE.shape[1])
        self._downs.store(x_PI, pairs.firsts_X, None, y_PE)
        out_TE = x_TE.new_empty(x_TE.shape)
        self._kernels.sum_pairs(y_PE, pairs.tokens_P, pairs.weights_P, out_TE)
        return out_TE

    def try_add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> bool:
        del x_TE, residual_TE
        return False

    def _gated(self, x_TE: torch.Tensor, firsts_X: torch.Tensor, tokens_P: torch.Tensor) -> torch.Tensor:
        """The activations of the pairs: P x I."""
        num_pairs, num_outputs = len(tokens_P), sum(part.num_outputs for part in self._gate_ups)
        x_PI = self._activations.borrow(x_TE.dtype, num_pairs, num_outputs // 2)
        if self._activation is Gate.SILU and len(self._gate_ups) == 1 and self._gate_ups[0].can_gate:
            self._gate_ups[0].gated(x_TE, firsts_X, tokens_P, x_PI)
            return x_PI
        gate_up_PM = self._products.borrow(x_TE.dtype, num_pairs, num_outputs)
        columns = gate_up_PM.split([part.num_outputs for part in self._gate_ups], 1)
        for part, y_PO in zip(self._gate_ups, columns, strict=True):
            part.store(x_TE, firsts_X, tokens_P, y_PO)
        self._kernels.gate_mul(gate_up_PM, self._activation, x_PI)
        return x_PI
