"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), written out; knows no request and no block table.

With tensor parallelism (Megatron-LM, 2019) every rank has its share of the heads, of the MLP's columns and of the
vocabulary; the residual stream is whole on each, and summed up twice a layer.

Shape suffixes: T tokens of a step, R rows that sample, V vocabulary, E hidden size, P query, key and value heads,
Q query heads, D head dimension, M = 2 x intermediate size, I intermediate size; heads, V, M and I are a rank's share.
"""

from copy import copy
from typing import Self

import torch

from engine.collectives import SINGLE_RANK, Collectives
from engine.layers.attention import Attention, HeadNorm
from engine.layers.backend import Backend, InputTokens, LinearLayer, MakeLinear
from engine.layers.merged_linear import merged_linear
from engine.layers.residual_stream import ResidualStream
from engine.loading.weights import Shard, WeightSource
from engine.model_config import ModelArchitecture


class LlamaForCausalLM:
    """Token ids to logits. Two calls, since most rows of a step need no logits."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: WeightSource,
        backend: Backend,
        linear: MakeLinear | None = None,
        collectives: Collectives = SINGLE_RANK,
    ) -> None:
        """`linear` makes the layers' projections; None: `backend.linear`, which always makes the projection to logits.

        ModelError if the ranks cannot share the weights equally.
        """
        a = architecture
        linear = linear or backend.linear
        self._backend = backend
        self._collectives = collectives
        self._eps = a.rms_norm_eps
        rows = _shard(0, collectives)
        self._embed_tokens_VE = weights.take_matrix(
            "model.embed_tokens.weight", a.vocab_size, a.hidden_size, shard=rows
        )
        self._first_token = collectives.rank * self._embed_tokens_VE.shape[0]
        self._layers = [
            DecoderLayer(a, index, weights, backend, linear, collectives) for index in range(a.num_layers)
        ]
        self._norm_E = weights.take("model.norm.weight", a.hidden_size)
        lm_head_VE = (
            self._embed_tokens_VE
            if a.tie_word_embeddings
            else weights.take_matrix("lm_head.weight", a.vocab_size, a.hidden_size, shard=rows)
        )
        self._lm_head = backend.linear(lm_head_VE, None)

    def first_layers(self, num_layers: int) -> Self:
        """A model of only these layers, with this one's embeddings, final norm and projection to logits. It shares all
        weights."""
        first = copy(self)
        first._layers = self._layers[:num_layers]
        return first

    def forward(self, tokens: InputTokens, attention: Attention) -> torch.Tensor:
        """Hidden states of every token, before the final norm: T x E."""
        residual_TE = self._backend.embed(tokens, self._embed_tokens_VE, self._first_token)
        residual_TE = residual_TE.to(self._norm_E.dtype)
        self._collectives.all_reduce_(residual_TE)
        stream = ResidualStream(residual_TE, self._backend, self._collectives, self._eps)
        for layer in self._layers:
            layer.forward(stream, attention)
        return stream.total()

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """R x the whole vocabulary, in the model's dtype; the same on every rank."""
        logits_RV = self._lm_head(self._backend.rms_norm(hidden_RE, self._norm_E, self._eps))
        return self._collectives.all_gather(logits_RV, -1)


class DecoderLayer:
    """Attention, then the gated MLP: branches of the residual stream, each after its own norm."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        index: int,
        weights: WeightSource,
        backend: Backend,
        linear: MakeLinear,
        collectives: Collectives,
    ) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        self._index = index
        self._backend = backend
        self._head_dim = a.head_dim
        q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        e, i = a.hidden_size, a.intermediate_size
        heads, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{heads}.q_proj": q_size, f"{heads}.k_proj": kv_size, f"{heads}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": i, f"{mlp}.up_proj": i}
        parts = Projections(weights, linear, collectives)

        self._input_norm_E = weights.take(f"{prefix}.input_layernorm.weight", e)
        self._qkv_proj = parts.columns(qkv, e, a.has_qkv_bias)
        self._head_norm = _head_norm(a, heads, weights, collectives.size) if a.has_qk_norm else None
        self._o_proj = parts.rows(f"{heads}.o_proj", e, q_size, a.has_o_bias)
        self._post_norm_E = weights.take(f"{prefix}.post_attention_layernorm.weight", e)
        self._gate_up_proj = parts.columns(gate_up, e, a.has_mlp_bias)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, i, a.has_mlp_bias)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        qkv_TPD = self._qkv_proj(stream.normed(self._input_norm_E)).unflatten(-1, (-1, self._head_dim))
        stream.add(self._o_proj, attention(self._index, qkv_TPD, self._head_norm))
        x_TE = stream.normed(self._post_norm_E)
        stream.add(self._down_proj, self._backend.gated(self._gate_up_proj, x_TE))


class Projections:
    """Makes one rank's share of a layer's matrix products."""

    def __init__(self, weights: WeightSource, linear: MakeLinear, collectives: Collectives) -> None:
        self._weights = weights
        self._linear = linear
        self._collectives = collectives

    def columns(self, sizes: dict[str, int], num_inputs: int, has_bias: bool) -> LinearLayer:
        """Projections of one input, as one product: `sizes` maps their names to their output features. Every rank
        computes its share of each."""
        shard = _shard(0, self._collectives)
        names = sizes.items()
        take = self._weights.take_matrix
        parts = [take(f"{name}.weight", size, num_inputs, shard=shard) for name, size in names]
        if not has_bias:
            return merged_linear(self._linear, parts, None)
        biases = [self._weights.take(f"{name}.bias", size, shard=shard) for name, size in names]
        return merged_linear(self._linear, parts, biases)

    def rows(self, name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> LinearLayer:
        """A projection of inputs that the ranks share: the caller sums the ranks' results."""
        shard = _shard(1, self._collectives)
        weight_OI = self._weights.take_matrix(f"{name}.weight", num_outputs, num_inputs, shard=shard)
        bias_O = self._weights.take(f"{name}.bias", num_outputs) if has_bias else None
        return self._linear(weight_OI, bias_O if self._collectives.rank == 0 else None)


def _shard(dim: int, collectives: Collectives) -> Shard | None:
    return Shard(dim, collectives.rank, collectives.size) if collectives.size > 1 else None


def _head_norm(
    architecture: ModelArchitecture, heads: str, weights: WeightSource, num_ranks: int
) -> HeadNorm:
    a = architecture
    q_weight_D = weights.take(f"{heads}.q_norm.weight", a.head_dim)
    k_weight_D = weights.take(f"{heads}.k_norm.weight", a.head_dim)
    return HeadNorm(
        q_weight_D, k_weight_D, a.num_heads // num_ranks, a.num_kv_heads // num_ranks, a.rms_norm_eps
    )
