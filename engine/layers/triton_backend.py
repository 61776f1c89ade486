"""TritonBackend: the parts of a decoder layer by kernels of our own, large matrix products by torch's library.

Shape suffixes: T tokens of a step, E hidden size, V vocabulary, I intermediate size, M = 2 x I, R sampled tokens.
"""

import torch

from engine.kernels.embedding import embed
from engine.kernels.rms_norm import add_rms_norm_, rms_norm
from engine.kernels.silu_mul import silu_mul
from engine.layers.backend import InputTokens
from engine.layers.triton_linear import TritonFp8Linear, TritonLinear


class TritonBackend:
    """Satisfies `engine.layers.backend.Backend`."""

    def linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> TritonLinear:
        return TritonLinear(weight_OI, bias_O)

    def fp8_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> TritonFp8Linear:
        return TritonFp8Linear(weight_OI, bias_O)

    def embed(self, tokens: InputTokens, weight_VE: torch.Tensor, first_token: int) -> torch.Tensor:
        assert tokens.sources_T is not None
        assert tokens.sampled_R is not None
        return embed(tokens.ids_T, tokens.sources_T, tokens.sampled_R, weight_VE, first_token)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm_(x_TE, residual_TE, weight_E, eps)

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up_TM)
