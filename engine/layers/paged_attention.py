"""PagedAttention: attention of a mixed step over the paged pool in plain torch; knows blocks, not requests.

Shape suffixes: T tokens of a step, Q query heads, H kv heads, G = Q / H query heads per kv head, K = 2 x H,
D head dimension, B requests of a decode group, M blocks of a table, S = M x block size, N tokens of a chunk, X = B x H.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batch import DecodeGroup, PrefillChunk, StepBatch
from engine.kv_cache import KVPool


class PagedAttention:
    """Prepares steps. Owns the buffer into which contexts are gathered: fresh memory for it in every layer would
    cost more in page faults than attention itself."""

    def __init__(self, pool: KVPool, num_heads: int, sliding_windows: Sequence[int | None]) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._windows = tuple(sliding_windows)
        self._buffer = torch.empty(0, dtype=pool.shape.dtype, device=pool.blocks_NLKHTD.device)

    def prepare(self, batch: StepBatch) -> "StepAttention":
        """Indices and masks of a step, computed once for all layers. One step at a time: they share the buffer."""
        for block_id, offset in batch.new_tails:
            self._pool.clear_from(block_id, offset)
        decodes = [self._decode_plan(group) for group in batch.decode_groups]
        prefills = [self._prefill_plan(chunk) for chunk in batch.prefill_chunks]
        self._reserve(max([plan.rows.numel() for plan in (*decodes, *prefills)], default=0))
        return StepAttention(
            self._pool, self._windows, self._pool.slot_rows(batch.slots_T), decodes, prefills, self._buffer
        )

    def _decode_plan(self, group: DecodeGroup) -> "_DecodePlan":
        masks = {window: self._decode_mask(group, window) for window in set(self._windows)}
        return _DecodePlan(
            group.start, len(group.context_lens_B), self._pool.block_rows(group.block_ids_BM), masks
        )

    def _decode_mask(self, group: DecodeGroup, window: int | None) -> torch.Tensor:
        """0 where a query may look, -inf elsewhere; (B x H) x G x S."""
        shape, size = self._pool.shape, group.block_ids_BM.shape[1] * self._pool.shape.block_size
        keys_S = torch.arange(size, device=group.context_lens_B.device)
        lengths_B1 = group.context_lens_B.unsqueeze(1)
        hidden_BS = keys_S >= lengths_B1
        if window is not None:
            hidden_BS |= keys_S < lengths_B1 - window
        mask_BS = torch.zeros(hidden_BS.shape, dtype=shape.dtype, device=hidden_BS.device).masked_fill_(
            hidden_BS, -math.inf
        )
        per_kv_head = self._num_heads // shape.num_kv_heads
        mask_BHGS = mask_BS[:, None, None].expand(-1, shape.num_kv_heads, per_kv_head, -1)
        return mask_BHGS.reshape(-1, per_kv_head, size)

    def _prefill_plan(self, chunk: PrefillChunk) -> "_PrefillPlan":
        masks = {window: self._prefill_mask(chunk, window) for window in set(self._windows)}
        rows = self._pool.block_rows(
            chunk.block_ids_1M if chunk.num_computed_tokens else chunk.block_ids_1M[:, :0]
        )
        return _PrefillPlan(chunk, rows, masks)

    def _prefill_mask(self, chunk: PrefillChunk, window: int | None) -> torch.Tensor | None:
        """N x (context + N), or None where plain causal masking from the first token on does the same."""
        length = chunk.num_computed_tokens + chunk.num_tokens
        if chunk.num_computed_tokens == 0 and (window is None or window >= length):
            return None
        device = self._pool.blocks_NLKHTD.device
        keys_S = torch.arange(length, device=device)
        queries_N1 = torch.arange(chunk.num_computed_tokens, length, device=device).unsqueeze(1)
        hidden_NS = keys_S > queries_N1
        if window is not None:
            hidden_NS |= keys_S <= queries_N1 - window
        mask_NS = torch.zeros(hidden_NS.shape, dtype=self._pool.shape.dtype, device=device)
        return mask_NS.masked_fill_(hidden_NS, -math.inf)

    def _reserve(self, num_rows: int) -> None:
        num_elements = num_rows * self._pool.shape.block_size * self._pool.shape.head_dim
        if num_elements > self._buffer.numel():
            self._buffer = torch.empty(
                max(num_elements, 2 * self._buffer.numel()),
                dtype=self._buffer.dtype,
                device=self._buffer.device,
            )


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    start: int
    num_requests: int
    rows: torch.Tensor
    mask_XGS: dict[int | None, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _PrefillPlan:
    chunk: PrefillChunk
    rows: torch.Tensor
    """Empty where the chunk is the request's beginning."""
    mask_NS: dict[int | None, torch.Tensor | None]


class StepAttention:
    """Satisfies `engine.layers.attention.Attention` for one step."""

    def __init__(
        self,
        pool: KVPool,
        windows: tuple[int | None, ...],
        slot_rows: torch.Tensor,
        decodes: list[_DecodePlan],
        prefills: list[_PrefillPlan],
        buffer: torch.Tensor,
    ) -> None:
        self._pool = pool
        self._windows = windows
        self._slot_rows = slot_rows
        self._decodes = decodes
        self._prefills = prefills
        self._buffer = buffer
        self._scale = pool.shape.head_dim**-0.5

    def __call__(self, layer: int, q_TQD: torch.Tensor, kv_TKD: torch.Tensor) -> torch.Tensor:
        view = self._pool.layers[layer]
        view.slot_rows_RD.index_copy_(0, self._slot_rows, kv_TKD.reshape(-1, kv_TKD.shape[-1]))
        out_TQD = torch.empty(q_TQD.shape, dtype=q_TQD.dtype, device=q_TQD.device)
        for decode in self._decodes:
            self._decode(layer, decode, q_TQD, out_TQD)
        for prefill in self._prefills:
            self._prefill(layer, prefill, q_TQD, kv_TKD, out_TQD)
        return out_TQD.view(len(out_TQD), -1)

    def _decode(self, layer: int, plan: _DecodePlan, q_TQD: torch.Tensor, out_TQD: torch.Tensor) -> None:
        """All requests of a group at once. The G query heads of a kv head are the rows of one small product, so no
        key or value is repeated. Products of this shape run 2-4 times faster on CPU than fused attention."""
        mask_XGS = plan.mask_XGS[self._windows[layer]]
        num_products, group_size, size = mask_XGS.shape
        head_dim = q_TQD.shape[-1]
        kv_2XSD = self._gather(layer, plan.rows).view(2, num_products, size, head_dim)
        rows = slice(plan.start, plan.start + plan.num_requests)
        q_XGD = q_TQD[rows].reshape(num_products, group_size, head_dim)
        scores_XGS = torch.baddbmm(mask_XGS, q_XGD, kv_2XSD[0].transpose(1, 2), alpha=self._scale)
        out_XGD = out_TQD[rows].view(num_products, group_size, head_dim)
        torch.bmm(scores_XGS.softmax(-1), kv_2XSD[1], out=out_XGD)

    def _prefill(
        self, layer: int, plan: _PrefillPlan, q_TQD: torch.Tensor, kv_TKD: torch.Tensor, out_TQD: torch.Tensor
    ) -> None:
        """One chunk. Its beginning needs no cache: the step's own keys and values are all there is."""
        chunk, num_kv_heads = plan.chunk, kv_TKD.shape[1] // 2
        rows = slice(chunk.start, chunk.start + chunk.num_tokens)
        if chunk.num_computed_tokens == 0:
            kv_2HSD = kv_TKD[rows].unflatten(1, (2, num_kv_heads)).permute(1, 2, 0, 3)
        else:
            gathered_2HSD = self._gather(layer, plan.rows).view(2, num_kv_heads, -1, kv_TKD.shape[-1])
            kv_2HSD = gathered_2HSD[:, :, : chunk.num_computed_tokens + chunk.num_tokens]
        mask_NS = plan.mask_NS[self._windows[layer]]
        out_1QND = F.scaled_dot_product_attention(
            q_TQD[rows].transpose(0, 1).unsqueeze(0),
            kv_2HSD[0].unsqueeze(0),
            kv_2HSD[1].unsqueeze(0),
            attn_mask=mask_NS,
            is_causal=mask_NS is None,
            scale=self._scale,
            enable_gqa=True,
        )
        out_TQD[rows] = out_1QND[0].transpose(0, 1)

    def _gather(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The blocks' keys and values of a layer, copied together; valid until the next call."""
        source_RX = self._pool.layers[layer].block_rows_RX
        out_RX = self._buffer[: rows.numel() * source_RX.shape[1]].view(rows.numel(), -1)
        return torch.index_select(source_RX, 0, rows, out=out_RX)
