"""Layers of gpt-oss: attention with a sink for each head, then a mixture of experts with biases.

Suffixes: T tokens of a step, P query, key and value heads of this rank, Q query heads, D head dimension, E hidden size.
"""

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.projections import Projections, qkv


class GptOssLayer:
    """Attention, then the experts: branches of the residual stream, each after its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, mlp, e, mixture = f"{prefix}.self_attn", f"{prefix}.mlp", a.hidden_size, a.mixtures[index]
        assert mixture is not None
        self._index = index
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(qkv(a, heads), e, has_bias=a.has_qkv_bias)
        self._sinks_Q = parts.sinks(a, heads)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim, has_bias=a.has_o_bias)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        experts = parts.interleaved_experts(mixture, f"{mlp}.experts", e)
        self._mixture = parts.mixture(mixture, f"{mlp}.router", experts, e, has_bias=True)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, None, self._sinks_Q))
        stream.add_mixture(self._mixture, stream.normed_rows(self._post_norm_E))
