"""MixtureBranch: experts as a branch of a layer, with the names of their tensors; knows no attention.

Suffixes: T tokens of a step, E hidden size.
"""

from typing import NamedTuple

import torch

from engine.families import Family
from engine.layers.residual_stream import ResidualStream
from engine.mixture_config import Mixture
from engine.models.projections import ExpertNames, Projections, gate_up


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
