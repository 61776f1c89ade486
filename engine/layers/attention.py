"""The seam between a model and whatever computes attention; knows no architecture and no device."""

from typing import Protocol

import torch


class Attention(Protocol):
    """Attention over the KV cache, prepared for the tokens of one step; called once per layer, in any order."""

    def __call__(self, layer: int, q_TQD: torch.Tensor, kv_TKD: torch.Tensor) -> torch.Tensor:
        """Stores the step's keys and values, then lets every token attend to its request so far.

        T tokens of the step, Q query heads, K = 2 x kv heads (first the keys, then the values), D head dimension; keys
        and queries carry their positions already. Returns T x (Q x D). Query heads are grouped: head i reads kv
        head i // (Q / kv heads).
        """
        ...
