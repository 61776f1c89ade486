"""Layers of Qwen3-MoE and Mixtral: like Llama's, but with experts instead of an MLP; tensors' names differ.

Suffixes: T tokens of a step, P query, key and value heads of this rank, D head dimension, E hidden size.
"""

from engine.families import Family
from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.model_config import ModelArchitecture
from engine.models.llama import LlamaLayer
from engine.models.projections import ExpertNames, Projections, qkv

BLOCKS = {
    Family.QWEN3_MOE: ("mlp", ExpertNames("gate_proj", "up_proj", "down_proj")),
    Family.MIXTRAL: ("block_sparse_moe", ExpertNames("w1", "w3", "w2")),
}
"""The checkpoints' names of the mixture and of its experts' matrices."""


class MixtureOfExpertsLayer:
    """Attention, then the experts: branches of the residual stream, each after its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, e = f"{prefix}.self_attn", a.hidden_size
        mixture, (name, names) = a.mixtures[index], BLOCKS[a.family]
        block = f"{prefix}.{name}"
        assert mixture is not None
        self._index = index
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(qkv(a, heads), e, has_bias=a.has_qkv_bias)
        self._head_norm = parts.head_norm(a, heads)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim, has_bias=a.has_o_bias)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        experts = parts.experts(mixture, f"{block}.experts", names, e)
        self._mixture = parts.mixture(mixture, f"{block}.gate", experts, e)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, self._head_norm))
        stream.add_mixture(self._mixture, stream.normed_rows(self._post_norm_E))


def mixture_layer(
    architecture: ModelArchitecture, index: int, parts: Projections
) -> MixtureOfExpertsLayer | LlamaLayer:
    """The layer of this index: with experts, or with one MLP, as in some layers of Qwen3-MoE."""
    layer = LlamaLayer if architecture.mixtures[index] is None else MixtureOfExpertsLayer
    return layer(architecture, index, parts)
