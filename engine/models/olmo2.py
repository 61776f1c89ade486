"""Layers of OLMo 2 and 3: each branch ends with a norm, and queries and keys are normalized over all heads together.

Suffixes: T tokens of a step, X outputs of this rank's projection, D head dimension, E hidden size.
"""

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.projections import Projections, gate_up, qkv


class Olmo2Layer:
    """Attention, then the gated MLP: branches of the residual stream, each normed before it is added."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, mlp, e = f"{prefix}.self_attn", f"{prefix}.mlp", a.hidden_size
        self._index = index
        self._backend = parts.backend
        self._head_dim = a.head_dim
        self._qkv_proj = parts.columns(qkv(a, heads), e, has_bias=a.has_qkv_bias)
        self._qk_norm = parts.projection_norm(a, heads)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim, has_bias=a.has_o_bias)
        self._attention_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._gate_up_proj = parts.columns(gate_up(mlp, a.intermediate_size), e)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, a.intermediate_size)
        self._mlp_norm_E = parts.norm(f"{prefix}.post_feedforward_layernorm", e)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TX = self._qkv_proj(stream.rows())
        self._qk_norm.apply_(qkv_TX)
        qkv_TPD = qkv_TX.unflatten(-1, (-1, self._head_dim))
        stream.add_normed(self._o_proj, attention(self._index, qkv_TPD, None), self._attention_norm_E)
        x_TI = self._backend.gated(self._gate_up_proj, stream.rows())
        stream.add_normed(self._down_proj, x_TI, self._mlp_norm_E)
