"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), written out; knows no request and no block table.

Shape suffixes: T tokens of a step, R rows that sample, V vocabulary, E hidden size, P query, key and value heads,
Q query heads, D head dimension, M = 2 x intermediate size, I intermediate size.
"""

import torch

from engine.layers.attention import Attention, HeadNorm
from engine.layers.backend import Backend, InputTokens, LinearLayer, MakeLinear
from engine.model_config import ModelArchitecture
from engine.weights import WeightSource


class LlamaForCausalLM:
    """Token ids to logits. Two calls, since most rows of a step need no logits."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: WeightSource,
        backend: Backend,
        linear: MakeLinear | None = None,
    ) -> None:
        """`linear` makes the layers' projections, None: `backend.linear`, as it always makes the one to logits."""
        a = architecture
        linear = linear or backend.linear
        self._backend = backend
        self._eps = a.rms_norm_eps
        self._embed_tokens_VE = weights.take("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        self._layers = [DecoderLayer(a, index, weights, backend, linear) for index in range(a.num_layers)]
        self._norm_E = weights.take("model.norm.weight", a.hidden_size)
        lm_head_VE = (
            self._embed_tokens_VE
            if a.tie_word_embeddings
            else weights.take("lm_head.weight", a.vocab_size, a.hidden_size)
        )
        self._lm_head = backend.linear(lm_head_VE, None)

    def forward(self, tokens: InputTokens, attention: Attention) -> torch.Tensor:
        """Hidden states of every token, before the final norm: T x E."""
        residual_TE = self._backend.embed(tokens, self._embed_tokens_VE, 0)
        branch_TE: torch.Tensor | None = None
        for layer in self._layers:
            branch_TE = layer.forward(branch_TE, residual_TE, attention)
        assert branch_TE is not None, "a model has layers"
        return residual_TE.add_(branch_TE)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """R x V, in the model's dtype."""
        return self._lm_head(self._backend.rms_norm(hidden_RE, self._norm_E, self._eps))


class DecoderLayer:
    """Attention, then the gated MLP: branches of the residual stream, each with its own norm in front.

    A branch is added to the stream together with the next norm, which may belong to the next layer.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        index: int,
        weights: WeightSource,
        backend: Backend,
        linear: MakeLinear,
    ) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        self._index = index
        self._eps = a.rms_norm_eps
        self._backend = backend
        self._head_dim = a.head_dim
        q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        e, i = a.hidden_size, a.intermediate_size
        heads, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{heads}.q_proj": q_size, f"{heads}.k_proj": kv_size, f"{heads}.v_proj": kv_size}

        self._input_norm_E = weights.take(f"{prefix}.input_layernorm.weight", e)
        self._qkv_proj = _merged(weights, qkv, e, a.has_qkv_bias, linear)
        self._head_norm = _head_norm(a, heads, weights) if a.has_qk_norm else None
        self._o_proj = _merged(weights, {f"{heads}.o_proj": e}, q_size, a.has_o_bias, linear)
        self._post_norm_E = weights.take(f"{prefix}.post_attention_layernorm.weight", e)
        self._gate_up_proj = _merged(
            weights, {f"{mlp}.gate_proj": i, f"{mlp}.up_proj": i}, e, a.has_mlp_bias, linear
        )
        self._down_proj = _merged(weights, {f"{mlp}.down_proj": e}, i, a.has_mlp_bias, linear)

    def forward(
        self, branch_TE: torch.Tensor | None, residual_TE: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """`branch_TE`: what the layer before has left to be added to the residual stream; the same is returned."""
        branch_TE = self._self_attention(self._normed(branch_TE, residual_TE, self._input_norm_E), attention)
        return self._mlp(self._normed(branch_TE, residual_TE, self._post_norm_E))

    def _normed(
        self, branch_TE: torch.Tensor | None, residual_TE: torch.Tensor, weight_E: torch.Tensor
    ) -> torch.Tensor:
        if branch_TE is None:
            return self._backend.rms_norm(residual_TE, weight_E, self._eps)
        return self._backend.add_rms_norm(branch_TE, residual_TE, weight_E, self._eps)

    def _self_attention(self, x_TE: torch.Tensor, attention: Attention) -> torch.Tensor:
        qkv_TPD = self._qkv_proj(x_TE).view(len(x_TE), -1, self._head_dim)
        return self._o_proj(attention(self._index, qkv_TPD, self._head_norm))

    def _mlp(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._down_proj(self._backend.silu_mul(self._gate_up_proj(x_TE)))


def _merged(
    weights: WeightSource, sizes: dict[str, int], num_inputs: int, has_bias: bool, linear: MakeLinear
) -> LinearLayer:
    """Projections of one input, as one matrix product: `sizes` maps their names to their output features."""
    weight_OI = torch.cat([weights.take(f"{name}.weight", size, num_inputs) for name, size in sizes.items()])
    if not has_bias:
        return linear(weight_OI, None)
    bias_O = torch.cat([weights.take(f"{name}.bias", size) for name, size in sizes.items()])
    return linear(weight_OI, bias_O)


def _head_norm(architecture: ModelArchitecture, heads: str, weights: WeightSource) -> HeadNorm:
    a = architecture
    q_weight_D = weights.take(f"{heads}.q_norm.weight", a.head_dim)
    k_weight_D = weights.take(f"{heads}.k_norm.weight", a.head_dim)
    return HeadNorm(q_weight_D, k_weight_D, a.num_heads, a.num_kv_heads, a.rms_norm_eps)
