"""PagedAttention: attention of a mixed step over the paged pool in plain torch; knows blocks, not requests.

Shape suffixes: T tokens of a step, Q query heads, H kv heads, G = Q / H query heads per kv head, K = 2 x H, P = Q + K,
D head dimension, B requests of a decode group, M blocks of a table, S = M x block size, X = B x H products.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.batch import StepBatch
from engine.kv_cache import KVPool
from engine.layers.attention import HeadNorm
from engine.layers.chunk_attention import (
    ChunkAttention,
    FusedAttention,
    TiledAttention,
    cap_,
    weights_beside,
)
from engine.layers.fp8 import FP8, as_bytes, saturate
from engine.layers.rope import RotaryEmbedding, rotate_
from engine.layers.workspace import Workspace
from engine.model_config import ModelArchitecture
from engine.request_table import IntArray

MIN_GROUP_BLOCKS = 8
"""Decodes with at most this many blocks share one group, since padding costs less than another kernel
call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The B rows of the step from `start` on, with one token each."""

    start: int
    block_ids_BM: torch.Tensor
    """The blocks of each context, padded with the null block."""
    context_lens_B: torch.Tensor
    """How many tokens each row attends to, including its own."""


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    rows: slice
    """The rows of this group's decodes in the step."""
    block_rows: torch.Tensor
    mask_XGS: dict[int | None, torch.Tensor]
    """A mask for each window: 0 where a query attends to a key, -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class _PrefillPlan:
    rows: slice
    num_keys: int
    block_rows: torch.Tensor | None
    """The pool's rows with the keys and values of the context up to the chunk's end. None if the chunk begins the
    request: then the context is the chunk itself, whose keys and values are those of this step."""
    attend: dict[int | None, ChunkAttention]
    """The chunk's attention, by window."""


class PagedAttention:
    """Prepares the attention of steps; owns memory that is reused in every layer."""

    def __init__(
        self,
        pool: KVPool,
        architecture: ModelArchitecture,
        num_heads: int,
        dtype: torch.dtype | None = None,
        group: int = 0,
    ) -> None:
        """`num_heads`: this rank's query heads. `dtype`: the dtype of activations; None: that of the pool.

        A pool with fewer bits than `dtype` is written and read without a scale. `group`: the KV group whose layers this
        object computes.
        """
        self._pool, self._group = pool, group
        self._num_heads = num_heads
        self._architecture = architecture
        self._windows = architecture.sliding_windows
        self._dtype, self._device = dtype or pool.shape.dtype, pool.blocks_NLKHTD.device
        assert can_store(pool.shape.dtype, self._dtype), f"{self._dtype} in a pool of {pool.shape.dtype}"
        self._ropes = {
            rope: RotaryEmbedding(rope, architecture.head_dim - architecture.rotated_from, self._device)
            for rope in dict.fromkeys(architecture.ropes)
        }
        self._gathered, self._scores, self._weights = (Workspace(self._device) for _ in range(3))
        self._stored = Workspace(self._device)

    def prepare(self, batch: StepBatch) -> "TorchStepAttention":
        """Computes a step's indices, angles and masks once for all layers.

        Steps share memory, so only one step at a time may use it.
        """
        blocks = batch.blocks[self._group]
        for block_id, offset in blocks.new_tails:
            self._pool.clear_from(block_id, offset)
        positions_T = torch.from_numpy(batch.positions_T).to(self._device)
        angles = {rope: each.angles(positions_T, self._dtype) for rope, each in self._ropes.items()}
        return TorchStepAttention(
            self._pool,
            self._num_heads,
            self._architecture,
            [angles[rope] for rope in self._architecture.ropes],
            self._pool.slot_rows(torch.from_numpy(blocks.slots_T).to(self._device)),
            [self._decode_plan(group) for group in decode_groups(batch, blocks.block_ids_BM, self._device)],
            [self._prefill_plan(batch, index, blocks.block_ids_BM) for index in batch.prefills],
            self._gathered,
            self._stored,
        )

    def _decode_plan(self, group: DecodeGroup) -> _DecodePlan:
        return _DecodePlan(
            rows=slice(group.start, group.start + len(group.context_lens_B)),
            block_rows=self._pool.block_rows(group.block_ids_BM),
            mask_XGS={window: self._decode_mask(group, window) for window in set(self._windows)},
        )

    def _decode_mask(self, group: DecodeGroup, window: int | None) -> torch.Tensor:
        num_kv_heads = self._pool.shape.num_kv_heads
        num_keys = group.block_ids_BM.shape[1] * self._pool.shape.block_size
        keys_S = torch.arange(num_keys, device=self._device)
        lengths_B1 = group.context_lens_B.unsqueeze(1)
        hidden_BS = keys_S >= lengths_B1
        if window is not None:
            hidden_BS |= keys_S < lengths_B1 - window
        mask_BS = torch.zeros(hidden_BS.shape, dtype=self._dtype, device=self._device)
        mask_BS.masked_fill_(hidden_BS, -math.inf)
        per_kv_head = self._num_heads // num_kv_heads
        return (
            mask_BS[:, None, None]
            .expand(-1, num_kv_heads, per_kv_head, -1)
            .reshape(-1, per_kv_head, num_keys)
        )

    def _prefill_plan(self, batch: StepBatch, index: int, block_ids_BM: IntArray) -> _PrefillPlan:
        start, num_tokens = int(batch.starts_B[index]), int(batch.num_tokens_B[index])
        num_keys = int(batch.context_lens_B[index])
        block_ids_1M = torch.from_numpy(block_ids_BM[index : index + 1, : batch.num_blocks_B[index]])
        return _PrefillPlan(
            rows=slice(start, start + num_tokens),
            num_keys=num_keys,
            block_rows=self._pool.block_rows(block_ids_1M.to(self._device))
            if num_keys > num_tokens
            else None,
            attend={
                window: self._chunk_attention(num_tokens, num_keys, window) for window in set(self._windows)
            },
        )

    def _chunk_attention(self, num_queries: int, num_keys: int, window: int | None) -> ChunkAttention:
        scale, cap = self._architecture.attention_scale, self._architecture.attention_cap
        is_special = cap is not None or self._architecture.has_sinks
        if is_special or (self._device.type == "cpu" and self._dtype is torch.bfloat16):
            return TiledAttention(
                num_queries,
                num_keys,
                window,
                self._scores,
                self._weights,
                self._dtype,
                self._device,
                scale=scale,
                cap=cap,
            )
        return FusedAttention(num_queries, num_keys, window, self._dtype, self._device, scale=scale)


@dataclass(frozen=True, slots=True)
class TorchStepAttention:
    """The attention of one step; an `Attention` of engine/layers/attention.py."""

    pool: KVPool
    num_heads: int
    architecture: ModelArchitecture
    angles: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines of every layer."""
    slot_rows: torch.Tensor
    decodes: list[_DecodePlan]
    prefills: list[_PrefillPlan]
    gathered: Workspace
    stored: Workspace

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q_TQD, kv_TKD = qkv_TPD[:, : self.num_heads], qkv_TPD[:, self.num_heads :]
        qk_TRD = qkv_TPD[:, : self.num_heads + self.pool.shape.num_kv_heads]
        if head_norm is not None:
            head_norm.apply_(qk_TRD)
        rotate_(qk_TRD[..., self.architecture.rotated_from :], *self.angles[layer])
        kv_TKD = self._store(layer, kv_TKD)
        out_TQD = torch.empty(q_TQD.shape, dtype=q_TQD.dtype, device=q_TQD.device)
        for decode in self.decodes:
            self._decode(layer, decode, q_TQD[decode.rows], out_TQD[decode.rows], sinks_Q)
        for prefill in self.prefills:
            k_HSD, v_HSD = self._chunk_kv(layer, prefill, kv_TKD[prefill.rows])
            attend = prefill.attend[self.architecture.sliding_windows[layer]]
            attend(q_TQD[prefill.rows], k_HSD, v_HSD, out_TQD[prefill.rows], sinks_Q)
        return out_TQD.view(len(out_TQD), -1)

    def _store(self, layer: int, kv_TKD: torch.Tensor) -> torch.Tensor:
        """Stores keys and values, and returns them as the pool rounded them.

        A chunk attends to these rounded values even if it reads nothing from the pool. Otherwise a token
        would depend on how its prompt was cut into chunks, and on whether its prefix was cached.
        """
        slot_rows_RD = self.pool.layers[layer].slot_rows_RD
        stored_TKD = saturate(kv_TKD) if slot_rows_RD.dtype is FP8 else kv_TKD.to(slot_rows_RD.dtype)
        rows_RD = as_bytes(stored_TKD.reshape(-1, stored_TKD.shape[-1]))
        as_bytes(slot_rows_RD).index_copy_(0, self.slot_rows, rows_RD)
        return stored_TKD.to(kv_TKD.dtype)

    def _decode(
        self,
        layer: int,
        plan: _DecodePlan,
        q_BQD: torch.Tensor,
        out_BQD: torch.Tensor,
        sinks_Q: torch.Tensor | None,
    ) -> None:
        """Computes all decodes of a group at once.

        The G query heads of a kv head are the rows of one small product, so no key or value is copied for
        each of them. Products of this shape run 2 to 4 times as fast on a CPU as the fused kernel."""
        mask_XGS = plan.mask_XGS[self.architecture.sliding_windows[layer]]
        shape_XGD = (*mask_XGS.shape[:2], q_BQD.shape[-1])
        kv_KXSD = self._gather(layer, plan.block_rows).view(-1, shape_XGD[0], mask_XGS.shape[2], shape_XGD[2])
        q_XGD, k_XDS = q_BQD.reshape(shape_XGD), kv_KXSD[0].transpose(1, 2)
        scale, cap = self.architecture.attention_scale, self.architecture.attention_cap
        if cap is None:
            scores_XGS = torch.baddbmm(mask_XGS, q_XGD, k_XDS, alpha=scale)
        else:
            scores_XGS = cap_(torch.bmm(q_XGD, k_XDS).mul_(scale), cap).add_(mask_XGS)
        if sinks_Q is None:
            weights_XGS = scores_XGS.softmax(-1)
        else:
            sinks_XG1 = sinks_Q.view(-1, shape_XGD[1], 1).repeat(len(q_BQD), 1, 1)
            weights_XGS = weights_beside(sinks_XG1, scores_XGS)
        torch.bmm(weights_XGS, kv_KXSD[-1], out=out_BQD.view(shape_XGD))

    def _chunk_kv(
        self, layer: int, plan: _PrefillPlan, kv_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each H x S x D, of all tokens up to the end of the chunk."""
        num_kv_heads, head_dim = self.pool.shape.num_kv_heads, kv_TKD.shape[2]
        if plan.block_rows is None:
            return kv_TKD[:, :num_kv_heads].transpose(0, 1), kv_TKD[:, -num_kv_heads:].transpose(0, 1)
        kv_KHSD = self._gather(layer, plan.block_rows).view(
            self.pool.shape.num_planes, num_kv_heads, -1, head_dim
        )
        return kv_KHSD[0, :, : plan.num_keys], kv_KHSD[-1, :, : plan.num_keys]

    def _gather(self, layer: int, block_rows: torch.Tensor) -> torch.Tensor:
        """Copies keys and values of whole blocks; the result is valid until the next call."""
        source_RX = self.pool.layers[layer].block_rows_RX
        gathered_RX = self.gathered.borrow(self.angles[layer][0].dtype, len(block_rows), source_RX.shape[1])
        if source_RX.dtype is gathered_RX.dtype:
            return torch.index_select(source_RX, 0, block_rows, out=gathered_RX)
        bits_RX = as_bytes(source_RX)
        stored_RX = self.stored.borrow(bits_RX.dtype, *gathered_RX.shape)
        torch.index_select(bits_RX, 0, block_rows, out=stored_RX)
        return gathered_RX.copy_(stored_RX.view(source_RX.dtype))


def decode_groups(batch: StepBatch, block_ids_BM: IntArray, device: torch.device) -> Iterator[DecodeGroup]:
    """Yields groups in the batch's order, with the longest contexts first.

    A group ends before the first context with at most half as many blocks as its longest. So at most about
    half of a table is padding."""
    num_blocks = batch.num_blocks_B.tolist()
    start = 0
    while start < batch.num_decodes:
        most = max(num_blocks[start : batch.num_decodes])  # a draft's context is longer than its request's
        limit = 0 if most <= MIN_GROUP_BLOCKS else most // 2
        end = start + 1
        while end < batch.num_decodes and num_blocks[end] > limit:
            end += 1
        yield DecodeGroup(
            start,
            torch.from_numpy(block_ids_BM[start:end, :most]).to(device),
            torch.from_numpy(batch.context_lens_B[start:end]).to(device),
        )
        start = end


def can_store(stored: torch.dtype, activations: torch.dtype) -> bool:
    """Whether a pool of one data type may store keys and values that were computed in another data type."""
    return stored in (activations, FP8) or (stored, activations) == (torch.bfloat16, torch.float32)
