"""Layers of Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Granite; with experts: of Qwen3-MoE, Mixtral and GLM-4.5.

The families differ in their attention and in scales. Some layers of Qwen3-MoE and GLM-4.5 have no experts.

Suffixes: T tokens of a step, P query, key and value heads of this rank, D head dimension, E hidden size.
"""

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.mixture import NAMES, MixtureBranch
from engine.models.projections import Projections, gate_up, order_of, qkv


class LlamaLayer:
    """Attention, then the gated MLP or the experts: branches of the residual stream, each after its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, mlp, e = f"{prefix}.self_attn", f"{prefix}.mlp", a.hidden_size
        order_D = order_of(a, index)
        self._index = index
        self._backend = parts.backend
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(qkv(a, heads, order_D), e, has_bias=a.has_qkv_bias)
        self._head_norm = parts.head_norm(a, heads, order_D)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim, has_bias=a.has_o_bias)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._experts = None
        if (mixture := a.mixtures[index]) is not None:
            self._experts = MixtureBranch(mixture, prefix, NAMES[a.family], e, parts)
            return
        self._gate_up_proj = parts.columns(gate_up(mlp, a.intermediate_size), e, has_bias=a.has_mlp_bias)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, a.intermediate_size, has_bias=a.has_mlp_bias)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, self._head_norm))
        if self._experts is not None:
            self._experts.add_to(stream, self._post_norm_E)
            return
        x_TE = stream.normed(self._post_norm_E)
        stream.add(self._down_proj, self._backend.gated(self._gate_up_proj, x_TE))
