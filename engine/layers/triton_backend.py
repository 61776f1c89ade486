"""TritonBackend: the parts of a decoder layer by Baton's own kernels; torch computes large matrix products.

Shape suffixes: T tokens of a step, E hidden size, V vocabulary, I intermediate size, M = 2 x I, R sampled tokens.
"""

from collections.abc import Iterable

import torch

from engine.activation import Activation, Gate
from engine.kernels.embedding import embed
from engine.kernels.expert_linear import token_counts_by_launch
from engine.kernels.gate_mul import gate_mul, gate_mul_fp8
from engine.kernels.rms_norm import add_rms_norm_, add_rms_norm_fp8_, rms_norm
from engine.kernels.row_launch import MAX_WIDTH
from engine.kernels.skinny_linear import MAX_FMA_TOKENS, MAX_TOKENS
from engine.kernels.switches import kernel_switches
from engine.layers.backend import (
    Activations,
    Expert,
    ExpertRouter,
    InputTokens,
    LinearLayer,
    MakeLinear,
    Matrix,
    QuantizedRows,
    UnnormedRows,
)
from engine.layers.fp8 import Fp8Weight
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.mixture import ExpertChoice
from engine.layers.triton_linear import NUM_ROWS, FewRows, TimedProducts, TritonFp8Linear, TritonLinear
from engine.layers.triton_mixture import TritonMixture
from engine.mixture_config import Mixture


class TritonBackend:
    """A `Backend` of engine/layers/backend.py, for GPUs.

    If the backend has made 8-bit linears, the kernels that compute their inputs also quantize these inputs, which saves
    a pass. In steps of few tokens, 8-bit linears use unquantized inputs instead, and linears of every kind are
    fused with the operations before and after them, as far as `KernelSwitches` allow.
    """

    def __init__(self) -> None:
        self.timed_products = TimedProducts()
        self.token_counts = set(NUM_ROWS)
        """Steps of these numbers of tokens launch every variant of the products."""
        self._has_fp8_linears = False

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> TritonLinear | TritonFp8Linear:
        """Makes a projection. That of an Fp8Weight quantizes its own inputs, since other layers may have 16-bit
        weights."""
        if isinstance(weight_OI, Fp8Weight):
            return TritonFp8Linear(weight_OI, bias_O)
        assert isinstance(weight_OI, torch.Tensor), "4 and 8 bits in groups are for CPUs"
        return TritonLinear(weight_OI, bias_O, self.timed_products)

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> TritonFp8Linear:
        assert not isinstance(weight_OI, GroupedWeight), "4 and 8 bits in groups are for CPUs"
        self._has_fp8_linears = True
        return TritonFp8Linear(weight_OI, bias_O)

    def mixture(
        self,
        mixture: Mixture,
        router: ExpertRouter,
        experts: Iterable[Expert],
        linear: MakeLinear,
        own_experts: range,
    ) -> TritonMixture:
        """Makes a mixture. The product of its router is not timed: a timed product may differ between ranks.
        But each rank computes the routing, so all ranks must multiply in the same way.
        """
        self.token_counts.update(token_counts_by_launch(mixture.num_chosen, mixture.num_experts))
        choice = ExpertChoice(mixture, router, TritonLinear(router.weight_XE, router.bias_X, None))
        return TritonMixture(choice, experts, own_experts, is_fp8=linear == self.fp8_linear)

    def embed(self, tokens: InputTokens, weight_VE: Matrix, first_token: int) -> torch.Tensor:
        assert isinstance(weight_VE, torch.Tensor), "4 and 8 bits in groups are for CPUs"
        assert tokens.sources_T is not None
        assert tokens.sampled_R is not None
        return embed(tokens.ids_T, tokens.sources_T, tokens.sampled_R, weight_VE, first_token)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> Activations:
        if len(x_TE) <= MAX_FMA_TOKENS and kernel_switches().fused_norm:
            return UnnormedRows(x_TE, weight_E, eps)
        return rms_norm(x_TE, weight_E, eps)

    def normed_rows(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> Activations:
        if self._quantizes(x_TE, x_TE.shape[1]):
            return QuantizedRows(*add_rms_norm_fp8_(x_TE, residual_TE, weight_E, eps), x_TE.dtype)
        return add_rms_norm_(x_TE, residual_TE, weight_E, eps)

    def add_normed(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> None:
        residual_TE.add_(rms_norm(x_TE, weight_E, eps))

    def gated(self, gate_up: LinearLayer, x_TE: Activations, gate: Activation = Gate.SILU) -> Activations:
        is_fused = kernel_switches().fused_silu and gate is Gate.SILU
        few_rows = _few_rows(gate_up, x_TE) if is_fused else None
        return self.gate_mul(gate_up(x_TE), gate) if few_rows is None else few_rows.gated(x_TE)

    def try_add(self, linear: LinearLayer, x_TI: Activations, residual_TE: torch.Tensor) -> bool:
        few_rows = _few_rows(linear, x_TI) if kernel_switches().fused_residual else None
        if few_rows is not None:
            few_rows.add_(residual_TE, x_TI)
        return few_rows is not None

    def gate_mul(self, gate_up_TM: torch.Tensor, gate: Activation = Gate.SILU) -> Activations:
        """T x I: the activation of the first I columns, times the other I columns."""
        if self._quantizes(gate_up_TM, gate_up_TM.shape[1] // 2):
            return QuantizedRows(*gate_mul_fp8(gate_up_TM, gate), gate_up_TM.dtype)
        return gate_mul(gate_up_TM, gate)

    def _quantizes(self, x_TE: torch.Tensor, width: int) -> bool:
        """Whether kernels quantize these rows. The rows must be many and 16-bit, and each must fit into a program's
        registers."""
        are_suitable = len(x_TE) > MAX_TOKENS and x_TE.dtype is not torch.float32
        return self._has_fp8_linears and are_suitable and width <= MAX_WIDTH


def _few_rows(linear: LinearLayer, x_TI: Activations) -> FewRows | None:
    """The layer's product of few rows, if this product supports `x_TI`."""
    assert isinstance(linear, TritonLinear | TritonFp8Linear), "made by another backend"
    return linear.few_rows if linear.few_rows.supports(x_TI) else None
