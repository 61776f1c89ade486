"""Decoder: computes logits from token ids with the layers of any family; knows no request and no block table.

With tensor parallelism (Megatron-LM, 2019) every rank has a share of the heads, of the MLP's columns and of the
vocabulary. The last ranks may have fewer tokens of the vocabulary. Every rank has the whole residual stream, and the
ranks add up their parts twice in each layer. With expert parallelism each rank has whole experts; the ranks add up
their parts at the same two places.

Shape suffixes: T tokens of a step, R rows that sample, V vocabulary (a rank's share), E hidden size.
"""

from collections.abc import Callable, Mapping
from copy import copy
from types import MappingProxyType
from typing import Protocol, Self

import torch
import torch.nn.functional as F

from engine.collectives import SINGLE_RANK, Collectives
from engine.families import Family
from engine.layers.attention import Attention, HeadNorm
from engine.layers.backend import Backend, InputTokens, MakeLinear
from engine.layers.chunk_attention import cap_
from engine.layers.residual_stream import ResidualStream
from engine.layers.scaled_attention import HeadFactors, KVScale, ScaledAttention
from engine.loading.weights import Shard, WeightSource
from engine.model_config import ModelArchitecture
from engine.models.deepseek import DeepSeekLayer
from engine.models.gemma import GemmaLayer
from engine.models.glm4 import Glm4Layer
from engine.models.gpt_oss import GptOssLayer
from engine.models.llama import LlamaLayer
from engine.models.minimax import MiniMaxLayer
from engine.models.olmo2 import Olmo2Layer
from engine.models.phi3 import Phi3Layer
from engine.models.projections import Projections, plus_one

NO_SCALES: Mapping[str, KVScale] = MappingProxyType({})


class Layer(Protocol):
    """One of a decoder's layers."""

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds the outputs of attention and MLP to the stream."""
        ...


LAYERS: Mapping[Family, Callable[[ModelArchitecture, int, Projections], Layer]] = {
    Family.LLAMA: LlamaLayer,
    Family.MISTRAL: LlamaLayer,
    Family.QWEN2: LlamaLayer,
    Family.QWEN3: LlamaLayer,
    Family.QWEN3_MOE: LlamaLayer,
    Family.MIXTRAL: LlamaLayer,
    Family.MINIMAX_M2: MiniMaxLayer,
    Family.SMOLLM3: LlamaLayer,
    Family.GRANITE: LlamaLayer,
    Family.PHI3: Phi3Layer,
    Family.OLMO2: Olmo2Layer,
    Family.OLMO3: Olmo2Layer,
    Family.GLM4: Glm4Layer,
    Family.GLM4_MOE: LlamaLayer,
    Family.GLM4_MOE_LITE: DeepSeekLayer,
    Family.GEMMA2: GemmaLayer,
    Family.GEMMA3: GemmaLayer,
    Family.GPT_OSS: GptOssLayer,
    Family.DEEPSEEK_V2: DeepSeekLayer,
    Family.DEEPSEEK_V3: DeepSeekLayer,
}


class _AttentionOfRows:
    """The last layer's attention: stores the keys and values of all tokens, but returns only `rows_R`."""

    def __init__(self, attention: Attention, stream: ResidualStream, rows_R: torch.Tensor) -> None:
        self._attention, self._stream, self._rows_R = attention, stream, rows_R

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads_TX = self._attention(layer, qkv_TPD, head_norm, sinks_Q)
        self._stream.keep(self._rows_R)
        return heads_TX[self._rows_R]


class Decoder:
    """A whole model. Hidden states and logits are two calls, since most rows of a step need no logits."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: WeightSource,
        backend: Backend,
        linear: MakeLinear | None = None,
        collectives: Collectives = SINGLE_RANK,
        kv_scales: Mapping[str, KVScale] = NO_SCALES,
        *,
        expert_parallel: bool = False,
    ) -> None:
        """`linear` makes the layers' projections; None: `backend.linear`.

        `backend.linear` always makes the projection to logits. `kv_scales`: the divisors of keys and values
        in the cache, by the name of the attention module. `expert_parallel`: each rank has whole experts.
        ModelError if the ranks cannot split a weight equally. Whole experts, and the vocabulary, need not be split
        equally.
        """
        a = architecture
        self._architecture = a
        self._backend = backend
        self._collectives = collectives
        rows = None
        if collectives.size > 1:
            rows = Shard(0, collectives.rank, collectives.size, is_equal=False)
        self._share = -(-a.vocab_size // collectives.size)
        linear = linear or backend.linear
        parts = Projections(weights, backend, linear, collectives, kv_scales, expert_parallel)
        self._embed_tokens_VE = weights.take_matrix(
            "model.embed_tokens.weight", a.vocab_size, a.hidden_size, shard=rows
        )
        self._first_token = collectives.rank * self._share
        layer = LAYERS[a.family]
        self._layers = [layer(a, index, parts) for index in range(a.num_layers)]
        norm_E = parts.norm("model.norm", a.hidden_size)
        self._dtype = norm_E.dtype
        self._head_factors = self._factors_of(kv_scales, norm_E.device)
        self._norm_E = plus_one(norm_E) if a.family.is_gemma else norm_E
        self._embedding_scale = a.embedding_scale
        if a.family.is_gemma:  # trained with this scale rounded to the dtype of the activations
            self._embedding_scale = torch.tensor(a.embedding_scale, dtype=self._dtype).item()
        lm_head_VE = (
            self._embed_tokens_VE
            if a.tie_word_embeddings
            else weights.take_matrix("lm_head.weight", a.vocab_size, a.hidden_size, shard=rows)
        )
        self._lm_head = backend.linear(lm_head_VE, None)

    def first_layers(self, num_layers: int) -> Self:
        """A model of the first `num_layers` layers, with this model's embeddings, final norm and LM head.

        It shares all weights with this model."""
        first = copy(self)
        first._layers = self._layers[:num_layers]
        return first

    def forward(
        self, tokens: InputTokens, attention: Attention, rows_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states before the final norm, R x E: of these rows, or of every token (None).

        After the last layer has stored its keys and values, no code reads the other rows. So they are not
        computed.
        """
        residual_TE = self._backend.embed(tokens, self._embed_tokens_VE, self._first_token)
        residual_TE = residual_TE.to(self._dtype)
        self._collectives.all_reduce_(residual_TE)
        if self._embedding_scale != 1.0:
            residual_TE.mul_(self._embedding_scale)
        stream = ResidualStream(
            residual_TE, self._backend, self._collectives, self._architecture.rms_norm_eps
        )
        if self._head_factors:
            attention = ScaledAttention(attention, self._head_factors)
        *layers, last = self._layers
        for layer in layers:
            layer.forward(stream, attention)
        last.forward(stream, attention if rows_R is None else _AttentionOfRows(attention, stream, rows_R))
        return stream.total()

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits of the whole vocabulary for R rows, in the model's dtype; the same on every rank."""
        a = self._architecture
        logits_RV = self._lm_head(self._backend.rms_norm(hidden_RE, self._norm_E, a.rms_norm_eps))
        if logits_RV.shape[-1] < self._share:  # every rank must send the same number of logits
            logits_RV = F.pad(logits_RV, (0, self._share - logits_RV.shape[-1]))
        logits_RV = self._collectives.all_gather(logits_RV)[:, : a.vocab_size]
        if a.logits_divisor != 1.0:
            logits_RV = logits_RV.div_(a.logits_divisor)
        return logits_RV if a.logits_cap is None else cap_(logits_RV, a.logits_cap)

    def _factors_of(self, scales: Mapping[str, KVScale], device: torch.device) -> dict[int, HeadFactors]:
        """The factors for scaled keys and values, by layer; only of layers with scales."""
        a, num_ranks = self._architecture, self._collectives.size
        num_heads, num_kv_heads = a.num_heads // num_ranks, a.num_kv_heads // num_ranks
        return {
            index: HeadFactors.of(scale, num_heads, num_kv_heads, device, has_head_norm=a.has_qk_norm)
            for index in range(a.num_layers)
            if (scale := scales.get(f"model.layers.{index}.self_attn")) is not None
        }
