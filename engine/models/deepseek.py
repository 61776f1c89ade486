"""Layers of DeepSeek-V2, -V3 and GLM-4.7-Flash: heads attend to one latent per token; some experts serve all tokens.

The checkpoint projects each latent to keys and values of all heads. Here queries are projected into the latent space,
and the output of attention is projected back. The results are the same, but the cache holds only latents.

Suffixes: T tokens of a step, Q query heads of this rank, C latent, R rotated part of a query or key, D = C + R, N the
rest of a query or key, V value, P = Q + 1 rows of attention, E hidden size, X other outputs of a projection.
"""

import torch

from engine.layers.attention import Attention
from engine.layers.residual_stream import ResidualStream
from engine.layers.rope import head_order
from engine.model_config import ModelArchitecture
from engine.models.mixture import MLP, MixtureBranch
from engine.models.projections import Columns, Projections, gate_up

LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, and of the vectors that queries are projected from. The epsilon in config.json
is for all other norms."""


class LatentHeads:
    """Computes attention from a layer's input, up to the input of the output projection."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections, heads: str) -> None:
        a, e, latent = architecture, architecture.hidden_size, architecture.latent
        assert latent is not None
        self._index = index
        self._backend = parts.backend
        self._latent = latent
        self._num_heads = a.num_heads // parts.collectives.size
        q_size = a.num_heads * latent.query_dim
        q_order = _order(latent.plain_dim, latent.rotary_dim, is_interleaved=latent.is_interleaved)
        kv_order = _order(latent.rank, latent.rotary_dim, is_interleaved=latent.is_interleaved)
        kv = Columns(
            name=f"{heads}.kv_a_proj_with_mqa", size=latent.size, order_D=kv_order, is_on_every_rank=True
        )
        self._query_norm_X = self._q_proj = None
        if latent.query_rank is None:
            q = Columns(name=f"{heads}.q_proj", size=q_size, order_D=q_order)
        else:
            q = Columns(name=f"{heads}.q_a_proj", size=latent.query_rank, is_on_every_rank=True)
        self._input_proj = parts.columns([q, kv], e)
        if latent.query_rank is not None:
            self._query_norm_X = parts.norm(f"{heads}.q_a_layernorm", latent.query_rank)
            q_b = Columns(name=f"{heads}.q_b_proj", size=q_size, order_D=q_order)
            self._q_proj = parts.columns([q_b], latent.query_rank)
        self._latent_norm_C = parts.norm(f"{heads}.kv_a_layernorm", latent.rank)
        kv_size = a.num_heads * (latent.plain_dim + latent.value_dim)
        kv_QXC = parts.numbers(f"{heads}.kv_b_proj", kv_size, latent.rank).unflatten(0, (self._num_heads, -1))
        self._key_QNC = kv_QXC[:, : latent.plain_dim].contiguous()
        self._value_QCV = kv_QXC[:, latent.plain_dim :].transpose(1, 2).contiguous()

    def __call__(
        self, stream: ResidualStream, input_norm_E: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """The input of the output projection: T x (Q x V)."""
        latent = self._latent
        q_TX, kv_TD = self._input_proj(stream.normed(input_norm_E)).tensor_split([-latent.size], -1)
        if self._q_proj is not None:
            assert self._query_norm_X is not None
            q_TX = self._q_proj(self._backend.rms_norm(q_TX.contiguous(), self._query_norm_X, LATENT_EPS))
        q_TQX = q_TX.unflatten(-1, (self._num_heads, -1))
        rows_TPD = q_TQX.new_empty(len(q_TQX), self._num_heads + 1, latent.size)
        q_QTN = q_TQX[..., : latent.plain_dim].transpose(0, 1)
        rows_TPD[:, :-1, : latent.rank] = torch.bmm(q_QTN, self._key_QNC).transpose(0, 1)
        rows_TPD[:, :-1, latent.rank :] = q_TQX[..., latent.plain_dim :]
        latents_TC = kv_TD[:, : latent.rank].contiguous()
        rows_TPD[:, -1, : latent.rank] = self._backend.normed_rows(
            latents_TC, self._latent_norm_C, LATENT_EPS
        )
        rows_TPD[:, -1, latent.rank :] = kv_TD[:, latent.rank :]
        out_TQX = attention(self._index, rows_TPD, None).unflatten(-1, (self._num_heads, -1))
        out_QTC = out_TQX[..., : latent.rank].transpose(0, 1)
        return torch.bmm(out_QTC, self._value_QCV).transpose(0, 1).flatten(1)


class DeepSeekLayer:
    """Attention, then an MLP or a mixture of experts; each branch begins with its own norm."""

    def __init__(self, architecture: ModelArchitecture, index: int, parts: Projections) -> None:
        a, prefix, e = architecture, f"model.layers.{index}", architecture.hidden_size
        heads, mlp, mixture, latent = f"{prefix}.self_attn", f"{prefix}.mlp", a.mixtures[index], a.latent
        assert latent is not None
        self._backend = parts.backend
        self._input_norm_E = parts.norm(f"{prefix}.input_layernorm", e)
        self._heads = LatentHeads(a, index, parts, heads)
        self._o_proj = parts.rows(f"{heads}.o_proj", e, a.num_heads * latent.value_dim)
        self._post_norm_E = parts.norm(f"{prefix}.post_attention_layernorm", e)
        self._experts = None
        if mixture is not None:
            self._experts = MixtureBranch(mixture, prefix, MLP, e, parts)
            return
        self._gate_up_proj = parts.columns(gate_up(mlp, a.intermediate_size), e)
        self._down_proj = parts.rows(f"{mlp}.down_proj", e, a.intermediate_size)

    def forward(self, stream: ResidualStream, attention: Attention) -> None:
        """Adds both branches to the stream."""
        stream.add(self._o_proj, self._heads(stream, self._input_norm_E, attention))
        if self._experts is not None:
            self._experts.add_to(stream, self._post_norm_E)
            return
        x_TE = stream.normed(self._post_norm_E)
        stream.add(self._down_proj, self._backend.gated(self._gate_up_proj, x_TE))


def _order(num_plain: int, num_rotated: int, *, is_interleaved: bool) -> torch.Tensor | None:
    """How a head is reordered if its last dimensions are rotated; None: not at all."""
    order_R = head_order(num_rotated, num_rotated, is_interleaved=is_interleaved)
    return None if order_R is None else torch.cat((torch.arange(num_plain), num_plain + order_R))
