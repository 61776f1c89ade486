"""The interface between a model and its attention; knows no architecture and no device.

Shape suffixes: T tokens of a step, Q query heads, H kv heads, P = Q + 2 x H, or Q + 1 with a latent, R = Q + H, D head
dimension.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class HeadNorm:
    """RMSNorm of each head of queries and keys before the rotation (Qwen3, Gemma 3)."""

    def __init__(
        self,
        q_weight_D: torch.Tensor,
        k_weight_D: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
    ) -> None:
        self.q_weight_D, self.k_weight_D, self.eps = q_weight_D, k_weight_D, eps
        self.q_float32_D, self.k_float32_D = (each.to(torch.float32) for each in (q_weight_D, k_weight_D))
        # Not by torch.cat: with meta tensors, it would import PyTorch's compiler, which takes a second at each start.
        self._weight_RD = q_weight_D.new_empty(num_heads + num_kv_heads, len(q_weight_D))
        self._weight_RD[:num_heads], self._weight_RD[num_heads:] = q_weight_D, k_weight_D

    def apply_(self, qk_TRD: torch.Tensor) -> None:
        """Normalizes queries and keys in place. Query heads come before key heads."""
        qk_TRD.copy_(F.rms_norm(qk_TRD, qk_TRD.shape[-1:], None, self.eps).mul_(self._weight_RD))


class Attention(Protocol):
    """Attention over the KV cache, prepared for the tokens of one step; called once per layer, in any order."""

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies `head_norm` (if any) and the rotation, stores keys and values, and returns T x (Q x D).

        Every token attends to its request's tokens up to itself. `qkv_TPD` is the projection's output
        (queries, keys, values), and may be overwritten. Query heads are grouped: head i reads kv head i // (Q
        / H). `sinks_Q` (float32): one learned logit per query head. It takes part in the softmax, but has no
        value.

        With a latent, the last row of each token is its latent, which is key and value of all heads. Each
        head's result then begins with the weighted sum of latents. Numbers that may follow it mean nothing.
        """
        ...
