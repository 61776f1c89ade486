"""ProjectionNorm: RMSNorm over the heads of all ranks; knows no attention.

Shape suffixes: T tokens of a step, X outputs of a rank's projection, of which Q are queries and K are keys.
"""

import torch

from engine.collectives import Collectives


class ProjectionNorm:
    """RMSNorm of the queries of all heads together, and of the keys of all heads together (OLMo 2)."""

    def __init__(
        self, q_weight_Q: torch.Tensor, k_weight_K: torch.Tensor, eps: float, collectives: Collectives
    ) -> None:
        """`q_weight_Q` and `k_weight_K`: this rank's part of the weights."""
        self._weights = q_weight_Q, k_weight_K
        self._eps = eps
        self._collectives = collectives

    def apply_(self, qkv_TX: torch.Tensor) -> None:
        """Norms queries and keys in place, in float32, and rounds once.

        Queries come first, then keys, then values.
        """
        q_weight_Q, k_weight_K = self._weights
        num_queries, num_keys = len(q_weight_Q), len(k_weight_K)
        parts = qkv_TX[:, :num_queries], qkv_TX[:, num_queries : num_queries + num_keys]
        squares_2T1 = torch.stack([part.to(torch.float32).square().sum(-1, keepdim=True) for part in parts])
        self._collectives.all_reduce_(squares_2T1)
        for part, weight, squares_T1 in zip(parts, self._weights, squares_2T1, strict=True):
            mean_T1 = squares_T1 / (len(weight) * self._collectives.size)
            part.mul_(torch.rsqrt(mean_T1 + self._eps) * weight)
