"""Steps of attention over scattered blocks: their plan, their buffers and their result in float64."""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.kernels.attention_plan import ITEM_FIELDS, MERGE_FIELDS, plan_attention, plan_bounds
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning
from engine.kernels.latent_attention import LatentKV, latent_attention
from engine.kernels.merge_partials import merge_partials
from engine.kernels.paged_attention import (
    LayerKV,
    Merging,
    Partials,
    Softmax,
    paged_attention,
    paged_attention_reference,
)

PLAIN = Softmax(0.2)
MANY_BLOCKS = 1000
"""Larger pools have only one layer, so that a few processes do not fill a device."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step, and how it is computed."""

    num_queries_B: list[int]
    context_lengths_B: list[int]
    shape: AttentionShape
    tuning: AttentionTuning
    softmax: Softmax = PLAIN
    num_programs: int = 3
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    has_sinks: bool = False


class _Step(ABC):
    """Requests with random contexts in scattered blocks, their plan and its buffers; outputs are NaN until written.

    All is drawn on the device, from a seed of the generator: on the host, large pools take seconds.
    """

    q_TQD: torch.Tensor
    sinks_Q: torch.Tensor | None = None

    def __init__(self, case: Case, device: torch.device, generator: torch.Generator) -> None:
        self.case, shape = case, case.shape
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        drawing = torch.Generator(device).manual_seed(seed)
        num_blocks_B = [-(-length // shape.block_size) for length in case.context_lengths_B]
        num_blocks = sum(num_blocks_B) + 1
        self._draw(drawing, sum(case.num_queries_B), num_blocks)
        order = (torch.randperm(num_blocks - 1, generator=drawing, device=device) + 1).to(torch.int32).cpu()
        self.block_ids_BM = torch.zeros(len(num_blocks_B), max(num_blocks_B), dtype=torch.int32)
        for row, (ids_M, count) in enumerate(zip(order.split(num_blocks_B), num_blocks_B, strict=True)):
            self.block_ids_BM[row, :count] = ids_M
        self.block_ids_BM = self.block_ids_BM.to(device)
        if case.has_sinks:  # one that takes all weight, and one that takes none
            self.sinks_Q = 4 * torch.randn(shape.num_query_heads, generator=drawing, device=device)
            self.sinks_Q[:2] = torch.tensor([300.0, -300.0])
        self._plan(device)

    @abstractmethod
    def _draw(self, drawing: torch.Generator, num_tokens: int, num_blocks: int) -> None:
        """Draws the queries and the pool."""

    def _plan(self, device: torch.device) -> None:
        case, shape = self.case, self.case.shape
        queries_B = np.asarray(case.num_queries_B, np.int64)
        grid = replace(case.tuning.grid(shape, 1), num_programs=case.num_programs)
        self.plan = plan_attention(
            np.arange(queries_B.size),
            np.cumsum(queries_B) - queries_B,
            queries_B,
            np.asarray(case.context_lengths_B, np.int64),
            grid,
            case.softmax.window,
        )
        bounds = plan_bounds(queries_B.size, int(queries_B.sum()), grid)
        # Items past the last one would write everywhere.
        self.items_IF = torch.full((bounds.num_items, ITEM_FIELDS), 1, dtype=torch.int32, device=device)
        self.items_IF[: len(self.plan.items_IF)] = torch.from_numpy(self.plan.items_IF)
        self.num_items = torch.tensor([len(self.plan.items_IF)], dtype=torch.int32, device=device)
        self.merges_RF = torch.zeros(bounds.num_merges, MERGE_FIELDS, dtype=torch.int32, device=device)
        self.merges_RF[: len(self.plan.merges_RF)] = torch.from_numpy(self.plan.merges_RF)
        self.num_merges = torch.tensor([len(self.plan.merges_RF)], dtype=torch.int32, device=device)
        self.partials = Partials.empty(bounds.num_partial_rows, shape, device)
        self.partials.out_PQD.fill_(math.nan)
        self.partials.weight_PQ.fill_(math.nan)
        result = (*self.q_TQD.shape[:2], shape.value_dim)
        self.out_TQD = torch.full(result, math.nan, dtype=case.dtype, device=device)

    @abstractmethod
    def attend(self) -> None:
        """Computes attention, and writes the partial results of items that are split."""

    def merge(self) -> None:
        """Merges what is split."""
        merge_partials(
            self.partials.out_PQD,
            self.partials.weight_PQ,
            self.merges_RF,
            self.num_merges,
            self.out_TQD,
            self.case.num_programs,
            self.sinks_Q,
        )

    def run(self) -> None:
        self.attend()
        self.merge()

    def _reference(self, kv_NKHSD: torch.Tensor) -> torch.Tensor:
        lengths = self.case.num_queries_B, self.case.context_lengths_B
        return paged_attention_reference(
            self.q_TQD, kv_NKHSD, self.block_ids_BM, *lengths, self.case.softmax, self.sinks_Q
        )


class PagedStep(_Step):
    """Attention to the keys and values of heads."""

    kv: LayerKV

    def _draw(self, drawing: torch.Generator, num_tokens: int, num_blocks: int) -> None:
        case, shape, device = self.case, self.case.shape, drawing.device
        width = (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv_TX = torch.randn(num_tokens, width, generator=drawing, device=device).to(case.dtype)
        self.q_TQD = qkv_TX[:, : shape.num_query_heads * shape.head_dim].unflatten(1, (-1, shape.head_dim))
        num_layers, layer = (3, 1) if num_blocks < MANY_BLOCKS else (1, 0)
        pool = (num_blocks, num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        blocks_NLKHSD = torch.randn(pool, generator=drawing, device=device)
        self.kv = LayerKV(blocks_NLKHSD.to(case.kv_dtype)[:, layer], shape)

    def merging(self) -> Merging:
        num_merges, num_kv_heads = len(self.merges_RF), self.case.shape.num_kv_heads
        counts_RH = torch.zeros(num_merges, num_kv_heads, dtype=torch.int32, device=self.merges_RF.device)
        return Merging(self.merges_RF, counts_RH)

    def attend(self, merging: Merging | None = None) -> None:
        case = self.case
        paged_attention(
            self.q_TQD, self.kv, self.block_ids_BM, self.items_IF, self.num_items, self.partials, self.out_TQD,
            case.softmax, case.tuning, case.num_programs, merging, self.sinks_Q,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        return self._reference(self.kv.kv_NKHSD)


class LatentStep(_Step):
    """Attention to latents. Queries lie beside the latent, as in a model."""

    kv: LatentKV

    def _draw(self, drawing: torch.Generator, num_tokens: int, num_blocks: int) -> None:
        case, shape, device = self.case, self.case.shape, drawing.device
        rows = (num_tokens, shape.num_query_heads + 1, shape.head_dim)
        self.q_TQD = torch.randn(rows, generator=drawing, device=device).to(case.dtype)[:, :-1]
        pool = (num_blocks, 2, 1, 1, shape.block_size, shape.head_dim)
        blocks_NLKHSD = torch.randn(pool, generator=drawing, device=device).to(case.kv_dtype)
        self.kv = LatentKV(blocks_NLKHSD[:, 1, 0, 0], shape)

    def attend(self) -> None:
        case = self.case
        latent_attention(
            self.q_TQD, self.kv, self.block_ids_BM, self.items_IF, self.num_items, self.partials, self.out_TQD,
            case.softmax.scale, case.tuning, case.num_programs,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        """Latents as keys and as values of one head."""
        kv_NKHSD = self.kv.latents_NSD[:, None, None].to(torch.float64).repeat(1, 2, 1, 1, 1)
        return self._reference(kv_NKHSD)[..., : self.case.shape.value_dim]
