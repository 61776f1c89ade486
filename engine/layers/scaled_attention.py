"""ScaledAttention: attention over a cache of keys and values divided by their layer's scales; knows no cache.

Shape suffixes: T tokens of a step, Q query heads, H kv heads, P = Q + 2 x H, D head dimension.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from engine.layers.attention import Attention, HeadNorm


@dataclass(frozen=True, slots=True)
class KVScale:
    """The divisors of a layer's keys and values, before the cache rounds them (`k_scale`, `v_scale`)."""

    key: float
    value: float


@dataclass(frozen=True, slots=True)
class HeadFactors:
    """The factors of a layer's projected heads, and the factor of its attention's result."""

    qkv_P1: torch.Tensor
    value: float

    @classmethod
    def of(
        cls, scale: KVScale, num_heads: int, num_kv_heads: int, device: torch.device, *, has_head_norm: bool
    ) -> Self:
        """The factors for these scales. `has_head_norm`: whether each head of queries and keys is normalized after
        the projection.

        Such a norm would undo factors of queries and keys. So the weights of the norm contain these factors
        instead."""
        query, key = (1.0, 1.0) if has_head_norm else (scale.key, 1.0 / scale.key)
        factors = [query] * num_heads + [key] * num_kv_heads + [1.0 / scale.value] * num_kv_heads
        return cls(torch.tensor(factors, dtype=torch.float32, device=device).unsqueeze(1), scale.value)


class ScaledAttention:
    """An `Attention` that calls another `Attention` with scaled queries, keys and values.

    Queries are multiplied by the scale that divides keys, and the result by the scale that divides values. So
    scores and results are the same as without scales, and no kernel has to know the scales. A rotation does
    not change this.
    """

    def __init__(self, attention: Attention, factors: Mapping[int, HeadFactors]) -> None:
        """`factors`: by layer. Layers without factors have no scales."""
        self._attention = attention
        self._factors = factors

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        factors = self._factors.get(layer)
        if factors is None:
            return self._attention(layer, qkv_TPD, head_norm, sinks_Q)
        qkv_TPD.mul_(factors.qkv_P1)
        return self._attention(layer, qkv_TPD, head_norm, sinks_Q).mul_(factors.value)
