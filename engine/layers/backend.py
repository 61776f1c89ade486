"""The interface between a model and a device's kernels; knows no architecture.

Shape suffixes: T tokens of a step, R tokens that were sampled, E hidden size, V vocabulary (this rank's share), I input
and O output features or intermediate size, M = 2 x I, X experts.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.activation import Activation, Gate
from engine.layers.fp8 import Fp8Weight
from engine.layers.grouped_weight import GroupedWeight
from engine.mixture_config import Mixture

Matrix = torch.Tensor | GroupedWeight | Fp8Weight
"""A matrix O x I: numbers in the activations' dtype, 8-bit floats, or (on CPUs) groups in 4 or 8 bits."""


@dataclass(frozen=True, slots=True)
class InputTokens:
    """A step's tokens, on the device."""

    ids_T: torch.Tensor
    sources_T: torch.Tensor | None = None
    """For each token its row in `sampled_R`, or -1 if `ids_T` has its id. None: `ids_T` has all ids."""
    sampled_R: torch.Tensor | None = None
    """The tokens that the previous step sampled, and that only the device knows."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations values_TI x scales_T1, quantized to 8 bits by the kernel that computed them."""

    values_TI: torch.Tensor
    """float8_e4m3fn."""
    scales_T1: torch.Tensor
    """float32."""
    dtype: torch.dtype
    """The activations' dtype before they were quantized."""


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """A few rows that are normed in the next product's kernel. The rows must not change until then."""

    rows_TE: torch.Tensor
    weight_E: torch.Tensor
    eps: float


Activations = torch.Tensor | QuantizedRows | UnnormedRows
"""Input of a projection. The backend that made the projection must also make the input. Only projections of
`fp8_linear` accept QuantizedRows."""


class LinearLayer(Protocol):
    """Computes `x_TI @ weight_OI.T + bias_O`; the weights were laid out for the device once."""

    def __call__(self, x_TI: Activations) -> torch.Tensor: ...


MakeLinear = Callable[[Matrix, torch.Tensor | None], LinearLayer]
"""Makes a layer of weight_OI and bias_O. The layer need not keep the given weight."""


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """The matrix with which a mixture scores its experts; every rank has the whole matrix."""

    weight_XE: torch.Tensor
    bias_X: torch.Tensor | None = None
    choice_bias_X: torch.Tensor | None = None
    """float32: added to scores only to choose experts; None: the mixture has no such bias."""


@dataclass(frozen=True, slots=True)
class Expert:
    """The matrices of one gated MLP of a mixture, or a rank's share of them."""

    gate_IE: Matrix
    up_IE: Matrix
    down_EI: Matrix
    biases_I: tuple[torch.Tensor, torch.Tensor] | None = None
    """The biases of gates and of ups."""
    down_bias_E: torch.Tensor | None = None
    """None on all ranks but one, if several ranks have a share of this expert."""


class MixtureLayer(Protocol):
    """Computes, for each row, the weighted sum of the outputs of its experts.

    A row's result depends on other rows only if the products' results depend on them.
    """

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """T x E; the caller may overwrite the result."""
        ...

    def try_add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> bool:
        """Adds the result to the residual stream in place, and returns True, if the layer's last launch can do so.

        Else computes nothing, and returns False.
        """
        ...


class Backend(Protocol):
    """The parts of a decoder layer besides attention."""

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        """Makes a projection. The layer need not keep the given weight."""
        ...

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        """Makes a projection with weights in 8-bit floats. Weights of another type are quantized first. The weight
        must not be a GroupedWeight.
        """
        ...

    def mixture(
        self,
        mixture: Mixture,
        router: ExpertRouter,
        experts: Iterable[Expert],
        linear: MakeLinear,
        own_experts: range,
    ) -> MixtureLayer:
        """A mixture of `experts`, which are read one after another. `linear` makes the experts' projections.

        `own_experts`: the indices of `experts` among all experts of the layer; other ranks have the remaining experts.
        The result is the sum over the row's experts on this rank; zeros if the row has none here.
        """
        ...

    def embed(self, tokens: InputTokens, weight_VE: Matrix, first_token: int) -> torch.Tensor:
        """T x E: each token's row of `weight_VE`, or zeros for tokens of other ranks.

        The first row of `weight_VE` is token `first_token`. The result is in float32 for a GroupedWeight."""
        ...

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> Activations:
        """RMSNorm. `weight_E`, here and in the other norms, has the activations' dtype, or float32."""
        ...

    def normed_rows(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm, always as plain numbers in the activations' dtype."""
        ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> Activations:
        """Adds `x_TE` to the residual stream in place, and returns the stream's rows, normed."""
        ...

    def add_normed(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> None:
        """Norms the rows of `x_TE`, and adds the result to the residual stream, in place."""
        ...

    def gated(self, gate_up: LinearLayer, x_TE: Activations, gate: Activation = Gate.SILU) -> Activations:
        """T x I: the activation of the first I outputs of `gate_up`, times the other I outputs."""
        ...

    def try_add(self, linear: LinearLayer, x_TI: Activations, residual_TE: torch.Tensor) -> bool:
        """Adds `linear(x_TI)` to the residual stream in place, and returns True, if one launch can multiply and add.

        Else computes nothing, and returns False.
        """
        ...
