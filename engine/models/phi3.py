"""Layers of Phi-3 and Phi-4: like Llama's, but with merged projections; part of each head may be unrotated.

Suffixes: T tokens of a step, P query, key and value heads of this rank, D head dimension, E hidden size.
"""

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.projections import Projections, merged_gate_up, merged_qkv, order_of


class Phi3Layer:
    """Attention, then the gated MLP: branches of the residual stream, each after its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, mlp, e = f"{prefix}.self_attn", f"{prefix}.mlp", a.hidden_size
        self._index = index
        self._backend = parts.backend
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(merged_qkv(a, heads, order_of(a, index)), e)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._gate_up_proj = parts.columns(merged_gate_up(a, mlp), e)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, a.intermediate_size)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, None))
        x_TE = stream.normed(self._post_norm_E)
        stream.add(self._down_proj, self._backend.gated(self._gate_up_proj, x_TE))
