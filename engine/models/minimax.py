"""Layers of MiniMax-M2: attention that normalizes the queries and keys of all heads together, then experts.

Suffixes: T tokens of a step, X outputs of this rank's projection, D head dimension, E hidden size.
"""

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.mixture import SPARSE_BLOCK, MixtureBranch
from engine.models.projections import Projections, order_of, qkv


class MiniMaxLayer:
    """Attention, then the experts: branches of the residual stream, each after its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, e, mixture = f"{prefix}.self_attn", a.hidden_size, a.mixtures[index]
        order_D = order_of(a, index)
        assert mixture is not None
        self._index = index
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(qkv(a, heads, order_D), e)
        self._qk_norm = parts.projection_norm(a, heads, order_D)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._experts = MixtureBranch(mixture, prefix, SPARSE_BLOCK, e, parts)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TX = self._qkv_proj(stream.normed(self._input_norm_E))
        self._qk_norm.apply_(qkv_TX)
        qkv_TPD = qkv_TX.unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, None))
        self._experts.add_to(stream, self._post_norm_E)
