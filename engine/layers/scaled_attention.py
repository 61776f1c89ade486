"""ScaledAttention: attention over a cache whose keys and values are divided by a scale of their layer; knows no cache.

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
    """What a layer's keys and values are divided by before the cache rounds them (`k_scale`, `v_scale`)."""

    key: float
    value: float


@dataclass(frozen=True, slots=True)
class HeadFactors:
    """What a layer's projected heads are multiplied by, and its result."""

    qkv_P1: torch.Tensor
    value: float

    @classmethod
    def of(
        cls, scale: KVScale, num_heads: int, num_kv_heads: int, device: torch.device, *, has_head_norm: bool
    ) -> Self:
        """`has_head_norm`: a norm of heads follows. It undoes any factor of queries and keys, so its own weights have
        these factors."""
        query, key = (1.0, 1.0) if has_head_norm else (scale.key, 1.0 / scale.key)
        factors = [query] * num_heads + [key] * num_kv_heads + [1.0 / scale.value] * num_kv_heads
        return cls(torch.tensor(factors, dtype=torch.float32, device=device).unsqueeze(1), scale.value)


class ScaledAttention:
    """Satisfies `Attention`, around another one.

    Queries are multiplied by the scale that divides keys, and the result by the scale that divides values. So scores
    and results are those without scales, and no kernel has to know them. Rotations change nothing about that.
    """

    def __init__(self, attention: Attention, factors: Mapping[int, HeadFactors]) -> None:
        """`factors`: by layer. The others' keys and values have no scales."""
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
