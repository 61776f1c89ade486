"""Attention of a prefill chunk: the last N of S tokens attend causally to all S tokens; knows no cache.

Shape suffixes: N queries, S keys, Q query heads, H kv heads, G = Q / H, D head dimension, n queries and s
keys of a tile.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.layers.workspace import Workspace

TILE = 128
"""Queries per tile; the fastest of 32 to 256 on an AVX-512 machine, for head dimensions 64 and 128."""


class ChunkAttention(Protocol):
    """Attention of one chunk with one window; called with the tensors of every layer."""

    def __call__(
        self,
        q_NQD: torch.Tensor,
        k_HSD: torch.Tensor,
        v_HSD: torch.Tensor,
        out_NQD: torch.Tensor,
        sinks_Q: torch.Tensor | None = None,
    ) -> None:
        """`sinks_Q`: see `engine.layers.attention.Attention`."""
        ...


class FusedAttention:
    """Attention by torch's fused kernel: one call, with scores in float32."""

    def __init__(
        self,
        num_queries: int,
        num_keys: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float,
    ) -> None:
        """`scale`: the factor of scores."""
        self._scale = scale
        is_plain = num_queries == num_keys and (window is None or window >= num_keys)
        self._mask_NS = None if is_plain else _mask(num_queries, 0, num_keys, window, dtype, device)

    def __call__(
        self,
        q_NQD: torch.Tensor,
        k_HSD: torch.Tensor,
        v_HSD: torch.Tensor,
        out_NQD: torch.Tensor,
        sinks_Q: torch.Tensor | None = None,
    ) -> None:
        assert sinks_Q is None, "the fused kernel knows no sinks"
        out_1QND = F.scaled_dot_product_attention(
            q_NQD.transpose(0, 1).unsqueeze(0),
            k_HSD.unsqueeze(0),
            v_HSD.unsqueeze(0),
            attn_mask=self._mask_NS,
            is_causal=self._mask_NS is None,
            scale=self._scale,
            enable_gqa=True,
        )
        out_NQD.copy_(out_1QND[0].transpose(0, 1))


@dataclass(frozen=True, slots=True)
class _Tile:
    queries: slice
    keys: slice
    """Keys that at least one of the queries attends to."""
    masked: slice
    """Keys that only some of the queries attend to, counted from the first of `keys`."""
    mask_ns: torch.Tensor


class TiledAttention:
    """Attention by two matrix products and a softmax per tile of queries, over only the keys that the tile needs.

    In bfloat16 on a CPU this runs 1.6 to 2 times as fast as the fused kernel, which computes in float32. Here
    the scores are rounded to bfloat16 before the softmax, like all other values between two layers.
    """

    def __init__(
        self,
        num_queries: int,
        num_keys: int,
        window: int | None,
        scores: Workspace,
        weights: Workspace,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float,
        cap: float | None = None,
    ) -> None:
        """`scale`: the factor of scores. `cap`: see `cap_`."""
        self._scores, self._weights = scores, weights
        self._scale, self._cap = scale, cap
        self._tiles = [
            _tile(start, min(start + TILE, num_queries), num_keys - num_queries, window, dtype, device)
            for start in range(0, num_queries, TILE)
        ]

    def __call__(
        self,
        q_NQD: torch.Tensor,
        k_HSD: torch.Tensor,
        v_HSD: torch.Tensor,
        out_NQD: torch.Tensor,
        sinks_Q: torch.Tensor | None = None,
    ) -> None:
        num_kv_heads, _, head_dim = k_HSD.shape
        per_kv_head = q_NQD.shape[1] // num_kv_heads
        k_HSD, v_HSD = k_HSD.contiguous(), v_HSD.contiguous()
        for tile in self._tiles:
            num_keys = tile.keys.stop - tile.keys.start
            q_nHGD = q_NQD[tile.queries].unflatten(1, (num_kv_heads, per_kv_head))
            q_HXD = q_nHGD.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
            scores_HXs = self._scores.borrow(q_HXD.dtype, num_kv_heads, q_HXD.shape[1], num_keys)
            k_HDs = k_HSD[:, tile.keys].transpose(1, 2)
            torch.baddbmm(scores_HXs, q_HXD, k_HDs, beta=0, alpha=self._scale, out=scores_HXs)
            if self._cap is not None:
                cap_(scores_HXs, self._cap)
            scores_HGns = scores_HXs.view(num_kv_heads, per_kv_head, -1, num_keys)
            scores_HGns[..., tile.masked] += tile.mask_ns
            if sinks_Q is None:
                weights_HXs = torch.softmax(
                    scores_HXs, -1, out=self._weights.borrow(q_HXD.dtype, *scores_HXs.shape)
                )
            else:
                sinks_HG11 = sinks_Q.view(num_kv_heads, per_kv_head, 1, 1)
                weights_HXs = weights_beside(sinks_HG11, scores_HGns).flatten(1, 2)
            out_HGnD = torch.bmm(weights_HXs, v_HSD[:, tile.keys]).view(*scores_HGns.shape[:3], head_dim)
            out_NQD[tile.queries] = out_HGnD.permute(2, 0, 1, 3).flatten(1, 2)


def cap_(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap x tanh(score / cap), in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def weights_beside(sinks: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The softmax over each row's scores together with a sink's logit.

    The result leaves out the sink's weight.
    """
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def _tile(
    start: int, end: int, num_earlier: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> _Tile:
    first_query, end_key = num_earlier + start, num_earlier + end
    first_key = 0 if window is None else max(0, first_query - window + 1)
    first_masked = first_query if window is None else first_key
    return _Tile(
        queries=slice(start, end),
        keys=slice(first_key, end_key),
        masked=slice(first_masked - first_key, end_key - first_key),
        mask_ns=_mask(end - start, first_masked, end_key, window, dtype, device),
    )


def _mask(
    num_queries: int,
    first_key: int,
    end_key: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """0 where a query attends to a key, -inf elsewhere. The last query has the position of the last key."""
    keys_S = torch.arange(first_key, end_key, device=device)
    queries_N1 = torch.arange(end_key - num_queries, end_key, device=device).unsqueeze(1)
    hidden_NS = keys_S > queries_N1
    if window is not None:
        hidden_NS |= keys_S <= queries_N1 - window
    return torch.zeros(hidden_NS.shape, dtype=dtype, device=device).masked_fill_(hidden_NS, -math.inf)
