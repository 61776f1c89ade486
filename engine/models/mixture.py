"""Layers of Qwen3-MoE, Mixtral and GLM-4.5: like Llama's, but with experts instead of an MLP.

Suffixes: T tokens of a step, P query, key and value heads of this rank, D head dimension, E hidden size.
"""

from typing import NamedTuple

import torch

from engine.families import Family
from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.mixture_config import Mixture
from engine.model_config import ModelArchitecture
from engine.models.llama import LlamaLayer
from engine.models.projections import ExpertNames, Projections, gate_up, order_of, qkv


class BranchNames(NamedTuple):
    """A checkpoint's names of a branch with experts and of its parts; they differ between families."""

    block: str
    experts: ExpertNames
    choice_bias: str = "gate.e_score_correction_bias"


MLP = BranchNames("mlp", ExpertNames("gate_proj", "up_proj", "down_proj"))
SPARSE_BLOCK = BranchNames(
    "block_sparse_moe", ExpertNames("w1", "w3", "w2"), choice_bias="e_score_correction_bias"
)
NAMES = {Family.QWEN3_MOE: MLP, Family.MIXTRAL: SPARSE_BLOCK, Family.GLM4_MOE: MLP}


class MixtureBranch:
    """A branch of the residual stream: the experts, and the MLP that all tokens use, if there is one."""

    def __init__(
        self, mixture: Mixture, prefix: str, names: BranchNames, hidden_size: int, parts: Projections
    ) -> None:
        """`prefix`: the layer's name."""
        block, e, size = f"{prefix}.{names.block}", hidden_size, mixture.shared_size
        self._backend = parts.backend
        experts = parts.experts(mixture, f"{block}.experts", names.experts, e)
        choice_bias = f"{block}.{names.choice_bias}"
        self._mixture = parts.mixture(mixture, f"{block}.gate", experts, e, choice_bias=choice_bias)
        self._has_shared = size > 0
        if self._has_shared:
            self._gate_up_proj = parts.columns(gate_up(f"{block}.shared_experts", size), e)
            self._down_proj = parts.rows(f"{block}.shared_experts.down_proj", e, size)

    def add_to(self, stream: ResidualStream, norm_E: torch.Tensor) -> None:
        """Adds the branch, which begins with a norm with these weights."""
        rows_TE = stream.normed_rows(norm_E)
        if not self._has_shared:
            stream.add_mixture(self._mixture, rows_TE)
            return
        branch_TE = self._mixture(rows_TE)
        stream.add_parts(branch_TE.add_(self._down_proj(self._backend.gated(self._gate_up_proj, rows_TE))))


class MixtureOfExpertsLayer:
    """Attention, then the experts: branches of the residual stream, each after its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        heads, e, mixture = f"{prefix}.self_attn", a.hidden_size, a.mixtures[index]
        order_D = order_of(a, index)
        assert mixture is not None
        self._index = index
        self._head_dim = a.head_dim
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._qkv_proj = parts.columns(qkv(a, heads, order_D), e, has_bias=a.has_qkv_bias)
        self._head_norm = parts.head_norm(a, heads, order_D)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * a.head_dim, has_bias=a.has_o_bias)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._experts = MixtureBranch(mixture, prefix, NAMES[a.family], e, parts)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, self._head_norm))
        self._experts.add_to(stream, self._post_norm_E)


def mixture_layer(
    architecture: ModelArchitecture, index: int, parts: Projections
) -> MixtureOfExpertsLayer | LlamaLayer:
    """The layer of this index: with experts, or with one MLP, as in some layers of Qwen3-MoE and GLM-4.5."""
    layer = LlamaLayer if architecture.mixtures[index] is None else MixtureOfExpertsLayer
    return layer(architecture, index, parts)
