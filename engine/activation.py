"""Activations of gated MLPs: how the gates and ups of the inner layer are combined; computes nothing."""

from dataclasses import dataclass
from enum import Enum


class Gate(Enum):
    """The activation of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU (2016), approximated with a tanh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """The activation of gpt-oss: (up + 1) x gate x sigmoid(alpha x gate).

    First, gates are clamped to at most `limit`, and ups to -limit .. limit.
    """

    alpha: float
    limit: float


Activation = Gate | ClampedSwiglu
"""How a gated MLP combines its gates and ups."""
