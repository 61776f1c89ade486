"""Layers of GLM-4 (0414): norms begin and end the branches; half of each head is rotated, in neighbouring pairs.

Suffixes: T tokens of a step, P query, key and value heads of this rank, D head dimension, E hidden size.
"""

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.projections import Projections, merged_gate_up, order_of, qkv


class Glm4Layer:
    """Attention, then the gated MLP: branches of the residual stream, each between two norms."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, mlp, e = f"{prefix}.self_attn", f"{prefix}.mlp", a.hidden_size
        order_D = order_of(a, index, is_interleaved=True)
        self._index = index
        self._backend = parts.backend
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(qkv(a, heads, order_D), e, has_bias=a.has_qkv_bias)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim)
        self._post_attention_norm_E = parts.norm(f"{prefix}.post_self_attn_layernorm", e)
        self._mlp_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._gate_up_proj = parts.columns(merged_gate_up(a, mlp), e)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, a.intermediate_size)
        self._post_mlp_norm_E = parts.norm(f"{prefix}.post_mlp_layernorm", e)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add_normed(self._o_proj, attention(self._index, qkv_TPD, None), self._post_attention_norm_E)
        x_TI = self._backend.gated(self._gate_up_proj, stream.normed(self._mlp_norm_E))
        stream.add_normed(self._down_proj, x_TI, self._post_mlp_norm_E)
