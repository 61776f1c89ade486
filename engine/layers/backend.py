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
"""O x I: numbers in the activations' dtype or, on CPUs, in 4 or 8 bits, or 8-bit floats."""


@dataclass(frozen=True, slots=True)
class InputTokens:
    """A step's tokens, on the device."""

    ids_T: torch.Tensor
    sources_T: torch.Tensor | None = None
    """The token's row in `sampled_R`, or -1 if `ids_T` has the token. None: `ids_T` has all tokens."""
    sampled_R: torch.Tensor | None = None
    """The previous step's tokens, which only the device knows."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations that were quantised to 8 bits where they were computed: values_TI x scales_T1."""

    values_TI: torch.Tensor
    """float8_e4m3fn."""
    scales_T1: torch.Tensor
    """float32."""
    dtype: torch.dtype
    """The original activations' dtype."""


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """Few rows that the next product norms; they must not change before."""

    rows_TE: torch.Tensor
    weight_E: torch.Tensor
    eps: float


Activations = torch.Tensor | QuantizedRows | UnnormedRows
"""Input of a layer's projection, made by the same backend; in 8 bits only for projections by `fp8_linear`."""


class LinearLayer(Protocol):
    """`x_TI @ weight_OI.T + bias_O`, with the weights laid out once for the device."""

    def __call__(self, x_TI: Activations) -> torch.Tensor: ...


MakeLinear = Callable[[Matrix, torch.Tensor | None], LinearLayer]
"""Makes a layer of weight_OI and bias_O. The layer need not keep the given weight."""


@dataclass(frozen=True, slots=True)
class Router:
    """The matrix by which a mixture scores its experts, whole on each rank."""

    weight_XE: torch.Tensor
    bias_X: torch.Tensor | None = None
    choice_bias_X: torch.Tensor | None = None
    """float32, added to scores for the choice of experts alone, if the mixture has it."""


@dataclass(frozen=True, slots=True)
class Expert:
    """The matrices of one gated MLP of a mixture, or a rank's share of them."""

    gate_IE: Matrix
    up_IE: Matrix
    down_EI: Matrix
    biases_I: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of gates and of what they multiply."""
    down_bias_E: torch.Tensor | None = None
    """On one rank only, if several have a share of this expert."""


class MixtureLayer(Protocol):
    """Every row's experts, weighted and summed. A row's result depends on no other row where its products' do not."""

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """T x E, which the caller may overwrite."""
        ...


class Backend(Protocol):
    """The parts of a decoder layer besides attention."""

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        """The layer need not keep the given weight."""
        ...

    def fp8_linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        """The same with 8-bit floats as weights, quantized here if they are none; not for a matrix in 4 or 8 bits."""
        ...

    def mixture(
        self,
        mixture: Mixture,
        router: Router,
        experts: Iterable[Expert],
        linear: MakeLinear,
        here: range | None = None,
    ) -> MixtureLayer:
        """A mixture of `experts`, which are taken one after another. `linear` makes the model's other projections.

        `here`: the numbers of `experts`, if other ranks have the others (None: these are all). The result is then the
        sum of a row's experts that are here, or zeros.
        """
        ...

    def embed(self, tokens: InputTokens, weight_VE: Matrix, first_token: int) -> torch.Tensor:
        """T x E: rows of `weight_VE`, which begins with token `first_token`; zeros for tokens of other ranks. In
        float32 if the matrix is in 4 or 8 bits."""
        ...

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> Activations:
        """Weights of this and of the other norms are in the activations' dtype, or in float32."""
        ...

    def normed_rows(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """The same, always as numbers of the activations' dtype."""
        ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> Activations:
        """Adds `x_TE` to the residual stream, in place, and returns its norm."""
        ...

    def add_normed(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> None:
        """Adds the norm of `x_TE` to the residual stream, in place."""
        ...

    def gated(self, gate_up: LinearLayer, x_TE: Activations, gate: Activation = Gate.SILU) -> Activations:
        """T x I: the activation of the first I outputs of `gate_up`, times the other I."""
        ...

    def adds(self, linear: LinearLayer, x_TI: Activations, residual_TE: torch.Tensor) -> bool:
        """Adds `linear(x_TI)` to the residual stream in place, if one launch can do both; returns whether it did."""
        ...
