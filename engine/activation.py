"""Activations of gated MLPs: how the two halves of their inner values become one; computes nothing."""

from dataclasses import dataclass
from enum import Enum


class Gate(Enum):
    """The activation of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU (2016), by its approximation with a tanh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """gpt-oss's: (up + 1) x gate x sigmoid(alpha x gate); gates are at most `limit`, ups between -limit and limit."""

    alpha: float
    limit: float


Activation = Gate | ClampedSwiglu
"""How the two halves of a gated MLP's inner values become one."""
