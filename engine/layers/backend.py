"""The seam between a model and the kernels of a device; knows no architecture.

Shape suffixes: T tokens of a step, R tokens that were sampled, E hidden size, V vocabulary (this rank's share), I input
and O output features or intermediate size, M = 2 x I.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class InputTokens:
    """A step's tokens, on the device."""

    ids_T: torch.Tensor
    sources_T: torch.Tensor | None = None
    """Row of `sampled_R` where the token is, or -1: then it is in `ids_T`. None: all are."""
    sampled_R: torch.Tensor | None = None
    """What the step before sampled, known to the device only."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations that were brought to 8 bits where they were computed: values_TI x scales_T1 stands for them."""

    values_TI: torch.Tensor
    """float8_e4m3fn."""
    scales_T1: torch.Tensor
    """float32."""
    dtype: torch.dtype
    """Of the activations they stand for."""


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """Few rows whose norm is left to the product that takes them; they stay as they are until it has."""

    rows_TE: torch.Tensor
    weight_E: torch.Tensor
    eps: float


Activations = torch.Tensor | QuantizedRows | UnnormedRows
"""What a layer's projection takes: whatever the backend gives that made it; 8 bits only where `fp8_linear` did."""


class LinearLayer(Protocol):
    """`x_TI @ weight_OI.T + bias_O`, with the weights laid out once for the device it runs on."""

    def __call__(self, x_TI: Activations) -> torch.Tensor: ...


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], LinearLayer]
"""Of weight_OI and bias_O. The given weight need not be kept."""


class Backend(Protocol):
    """What a decoder layer consists of besides attention."""

    def linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> LinearLayer:
        """The given weight need not be kept."""
        ...

    def fp8_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> LinearLayer:
        """The same with weights in 8 bits, quantized here."""
        ...

    def embed(self, tokens: InputTokens, weight_VE: torch.Tensor, first_token: int) -> torch.Tensor:
        """T x E: rows of `weight_VE`, whose first is that of token `first_token`; zeros for tokens of other ranks."""
        ...

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> Activations: ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> Activations:
        """Adds `x_TE` to the residual stream, in place, and returns its norm."""
        ...

    def gated(self, gate_up: LinearLayer, x_TE: Activations) -> Activations:
        """T x I: silu of the first I outputs of `gate_up`, times the others."""
        ...

    def adds(self, linear: LinearLayer, x_TI: Activations, residual_TE: torch.Tensor) -> bool:
        """Adds `linear(x_TI)` to the residual stream, in place, if one launch does both; else it does nothing."""
        ...
