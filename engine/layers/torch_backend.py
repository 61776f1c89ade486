"""TorchBackend: the parts of a decoder layer in plain torch, for any device that torch knows.

Shape suffixes: T tokens of a step, E hidden size, V vocabulary, I intermediate size, M = 2 x I.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.activation import Activation, ClampedSwiglu, Gate
from engine.layers.backend import (
    Activations,
    Expert,
    ExpertRouter,
    InputTokens,
    LinearLayer,
    MakeLinear,
    Matrix,
    MixtureLayer,
)
from engine.layers.fp8 import Fp8Weight
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.linear import Fp8Linear, GroupedLinear, Linear
from engine.layers.merged_linear import merged_linear
from engine.layers.mixture import ExpertChoice, LoopedMixture
from engine.mixture_config import Mixture


class TorchBackend:
    """A `Backend` of engine/layers/backend.py, in plain torch."""

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        if isinstance(weight_OI, GroupedWeight):
            return GroupedLinear(weight_OI, bias_O)
        if isinstance(weight_OI, Fp8Weight):
            return Fp8Linear(weight_OI, bias_O)
        return Linear(weight_OI, bias_O)

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        assert not isinstance(weight_OI, GroupedWeight), "quantized already"
        return Fp8Linear(weight_OI, bias_O)

    def mixture(
        self,
        mixture: Mixture,
        router: ExpertRouter,
        experts: Iterable[Expert],
        linear: MakeLinear,
        own_experts: range,
    ) -> MixtureLayer:
        choice = ExpertChoice(mixture, router, self.linear(router.weight_XE, router.bias_X))
        layers = [
            (
                merged_linear(linear, [expert.gate_IE, expert.up_IE], expert.biases_I),
                linear(expert.down_EI, expert.down_bias_E),
            )
            for expert in experts
        ]
        return self.mixture_of(choice, layers, own_experts)

    def mixture_of(
        self, choice: ExpertChoice, experts: Sequence[tuple[LinearLayer, LinearLayer]], own_experts: range
    ) -> MixtureLayer:
        """A mixture of experts with these projections: to gate and up, and back (down)."""
        gated = partial(self.gated, gate=choice.mixture.activation)
        return LoopedMixture(choice, experts, gated, own_experts)

    def embed(self, tokens: InputTokens, weight_VE: Matrix, first_token: int) -> torch.Tensor:
        assert tokens.sources_T is None, "without a device sampler the host knows all tokens"
        rows_T = tokens.ids_T - first_token
        is_elsewhere_T = (rows_T < 0) | (rows_T >= weight_VE.shape[0])
        rows_T = rows_T.masked_fill(is_elsewhere_T, 0)
        if isinstance(weight_VE, GroupedWeight):
            x_TE = weight_VE.outputs(rows_T).dequantized()
        else:
            assert isinstance(weight_VE, torch.Tensor), "rows of 8-bit floats are not looked up"
            x_TE = F.embedding(rows_T, weight_VE)
        return x_TE.masked_fill_(is_elsewhere_T.unsqueeze(-1), 0.0)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        if weight_E.dtype is not x_TE.dtype:
            return F.rms_norm(x_TE.to(weight_E.dtype), weight_E.shape, weight_E, eps).to(x_TE.dtype)
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)

    def normed_rows(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(residual_TE.add_(x_TE), weight_E, eps)

    def add_normed(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> None:
        residual_TE.add_(self.rms_norm(x_TE, weight_E, eps))

    def gated(self, gate_up: LinearLayer, x_TE: Activations, gate: Activation = Gate.SILU) -> torch.Tensor:
        gate_TI, up_TI = gate_up(x_TE).chunk(2, -1)
        if isinstance(gate, ClampedSwiglu):
            gate_TI, up_TI = gate_TI.clamp(max=gate.limit), up_TI.clamp(-gate.limit, gate.limit)
            return gate_TI.mul_(torch.sigmoid(gate_TI * gate.alpha)).mul_(up_TI.add_(1.0))
        activated_TI = F.silu(gate_TI) if gate is Gate.SILU else F.gelu(gate_TI, approximate="tanh")
        return activated_TI.mul_(up_TI)

    def try_add(self, linear: LinearLayer, x_TI: Activations, residual_TE: torch.Tensor) -> bool:  # noqa: ARG002
        return False
