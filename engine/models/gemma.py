"""Layers of Gemma 2 and 3: norms begin and end the branches; norms multiply by 1 + weight.

Suffixes: T tokens of a step, P query, key and value heads of this rank, D head dimension, E hidden size.
"""

from engine.activation import Gate
from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.projections import Projections, gate_up, qkv


class GemmaLayer:
    """Attention, then the gated MLP: branches of the residual stream, each between two norms."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, mlp, e = f"{prefix}.self_attn", f"{prefix}.mlp", a.hidden_size
        self._index = index
        self._backend = parts.backend
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e, from_one=True)
        self._qkv_proj = parts.columns(qkv(a, heads), e, has_bias=a.has_qkv_bias)
        self._head_norm = parts.head_norm(a, heads, from_one=True)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim, has_bias=a.has_o_bias)
        self._post_attention_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e, from_one=True)
        self._mlp_norm_E = parts.norm(f"{prefix}.pre_feedforward_layernorm", e, from_one=True)
        self._gate_up_proj = parts.columns(gate_up(mlp, a.intermediate_size), e)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, a.intermediate_size)
        self._post_mlp_norm_E = parts.norm(f"{prefix}.post_feedforward_layernorm", e, from_one=True)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        heads_TX = attention(self._index, qkv_TPD, self._head_norm)
        stream.add_normed(self._o_proj, heads_TX, self._post_attention_norm_E)
        x_TE = stream.normed(self._mlp_norm_E)
        x_TI = self._backend.gated(self._gate_up_proj, x_TE, Gate.GELU_TANH)
        stream.add_normed(self._down_proj, x_TI, self._post_mlp_norm_E)
