"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), written out; knows no request and no block table.

Shape suffixes: T tokens of a step, V vocabulary, E hidden size, H query heads + kv heads, Q query heads,
K 2 x kv heads, D head dimension, M = 2 x intermediate size.
"""

import torch
import torch.nn.functional as F

from engine.layers.attention import Attention
from engine.layers.linear import Linear, LinearLayer, MakeLinear
from engine.layers.rope import RotaryEmbedding, rotate_
from engine.model_config import ModelArchitecture
from engine.weights import WeightSource


class LlamaForCausalLM:
    """Token ids to logits. Two calls, since most rows of a step need no logits."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: WeightSource,
        device: torch.device,
        linear: MakeLinear = Linear,
    ) -> None:
        """`weights` are on `device`. `linear` makes the layers' projections; the one to logits is always plain."""
        a = architecture
        self._eps = a.rms_norm_eps
        self._embed_tokens_VE = weights.take("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        self._layers = [DecoderLayer(a, index, weights, linear) for index in range(a.num_layers)]
        self._norm_E = weights.take("model.norm.weight", a.hidden_size)
        self._rope = RotaryEmbedding(a.rope, a.head_dim, device)
        if a.tie_word_embeddings:
            self._lm_head = Linear(self._embed_tokens_VE)
        else:
            self._lm_head = Linear(weights.take("lm_head.weight", a.vocab_size, a.hidden_size))

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Hidden states of every token, before the final norm."""
        hidden_TE = F.embedding(input_ids_T, self._embed_tokens_VE)
        cos_T1D, sin_T1D = self._rope.angles(positions_T, hidden_TE.dtype)
        for layer in self._layers:
            hidden_TE = layer.forward(hidden_TE, cos_T1D, sin_T1D, attention)
        return hidden_TE

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """T x V, in the model's dtype; T here are the rows that sample."""
        return self._lm_head(F.rms_norm(hidden_TE, self._norm_E.shape, self._norm_E, self._eps))


class DecoderLayer:
    """Attention, then the gated MLP, each with its own norm in front and added to the residual stream."""

    def __init__(
        self, architecture: ModelArchitecture, index: int, weights: WeightSource, linear: MakeLinear
    ) -> None:
        a, prefix = architecture, f"model.layers.{index}"
        self._index = index
        self._eps = a.rms_norm_eps
        self._num_heads, self._num_kv_heads, self._head_dim = a.num_heads, a.num_kv_heads, a.head_dim
        q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        e, m = a.hidden_size, a.intermediate_size
        heads, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

        self._input_norm_E = weights.take(f"{prefix}.input_layernorm.weight", e)
        self._qkv_proj = _merged(
            weights,
            {f"{heads}.q_proj": q_size, f"{heads}.k_proj": kv_size, f"{heads}.v_proj": kv_size},
            e,
            a.has_qkv_bias,
            linear,
        )
        self._qk_norm_HD = _qk_norm(a, heads, weights) if a.has_qk_norm else None
        self._o_proj = _merged(weights, {f"{heads}.o_proj": e}, q_size, a.has_o_bias, linear)
        self._post_norm_E = weights.take(f"{prefix}.post_attention_layernorm.weight", e)
        self._gate_up_proj = _merged(
            weights, {f"{mlp}.gate_proj": m, f"{mlp}.up_proj": m}, e, a.has_mlp_bias, linear
        )
        self._down_proj = _merged(weights, {f"{mlp}.down_proj": e}, m, a.has_mlp_bias, linear)

    def forward(
        self, hidden_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        normed_TE = F.rms_norm(hidden_TE, self._input_norm_E.shape, self._input_norm_E, self._eps)
        hidden_TE = self._self_attention(normed_TE, cos_T1D, sin_T1D, attention).add_(hidden_TE)
        normed_TE = F.rms_norm(hidden_TE, self._post_norm_E.shape, self._post_norm_E, self._eps)
        return self._mlp(normed_TE).add_(hidden_TE)

    def _self_attention(
        self, x_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        num_rotated = self._num_heads + self._num_kv_heads
        qkv_TXD = self._qkv_proj(x_TE).view(len(x_TE), num_rotated + self._num_kv_heads, self._head_dim)
        qk_THD = qkv_TXD[:, :num_rotated]
        if self._qk_norm_HD is not None:
            qk_THD.copy_(F.rms_norm(qk_THD, (self._head_dim,), None, self._eps).mul_(self._qk_norm_HD))
        rotate_(qk_THD, cos_T1D, sin_T1D)
        return self._o_proj(
            attention(self._index, qkv_TXD[:, : self._num_heads], qkv_TXD[:, self._num_heads :])
        )

    def _mlp(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = self._gate_up_proj(x_TE).chunk(2, -1)
        return self._down_proj(F.silu(gate_TI).mul_(up_TI))


def _merged(
    weights: WeightSource, sizes: dict[str, int], num_inputs: int, has_bias: bool, linear: MakeLinear
) -> LinearLayer:
    """Projections of one input, as one matrix product: `sizes` maps their names to their output features."""
    weight_OI = torch.cat([weights.take(f"{name}.weight", size, num_inputs) for name, size in sizes.items()])
    if not has_bias:
        return linear(weight_OI, None)
    bias_O = torch.cat([weights.take(f"{name}.bias", size) for name, size in sizes.items()])
    return linear(weight_OI, bias_O)


def _qk_norm(architecture: ModelArchitecture, heads: str, weights: WeightSource) -> torch.Tensor:
    """The norm weights of queries and keys, one row per head."""
    q_D = weights.take(f"{heads}.q_norm.weight", architecture.head_dim)
    k_D = weights.take(f"{heads}.k_norm.weight", architecture.head_dim)
    rows = [q_D.expand(architecture.num_heads, -1), k_D.expand(architecture.num_kv_heads, -1)]
    return torch.cat(rows)
