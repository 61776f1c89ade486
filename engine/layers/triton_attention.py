"""TritonAttention: attention of a step over the paged pool by Baton's GPU kernels; knows no request.

A layer needs two or three launches:

* `rope_store`: norm, rotation and store
* `paged_attention`: attention
* `merge_partials`: merges the parts of contexts that are split, in steps with chunks

With latents, the first two launches are `latent_store` and `latent_attention`, and steps of decodes also have the
third. The host cuts the work into items once per step and window. All KV groups of a step share these items, but each
group has its own block tables.

Shape suffixes: T tokens of a step, B its requests, G KV groups, Q query heads, P query, key and value heads or
positions, D head dimension, C latent, I items of work, R merged rows, F their fields, X block ids of all requests and
groups.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from triton.runtime import driver

from engine.batch import StepBatch, StepLimits
from engine.device import gpu_of
from engine.gpu.block_tables import PackedTables, most_entries, pack_tables
from engine.gpu.staging import ALIGNMENT, StagedArray
from engine.kernels.attention_plan import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    AttentionPlan,
    PlanBounds,
    TileGrid,
    plan_attention,
    plan_bounds,
)
from engine.kernels.attention_tuning import (
    RESERVED_BYTES,
    SHARED_BYTES,
    AttentionShape,
    AttentionTuning,
    decode_tuning,
    latent_tuning,
    prefill_tuning,
)
from engine.kernels.latent_attention import LatentKV, latent_attention
from engine.kernels.latent_store import latent_store
from engine.kernels.merge_partials import merge_partials
from engine.kernels.paged_attention import LayerKV, Merging, Partials, Softmax, paged_attention
from engine.kernels.rope_store import rope_store
from engine.kernels.switches import kernel_switches
from engine.kv_cache import KVPool
from engine.layer_groups import LayerGroups
from engine.layers.attention import HeadNorm
from engine.layers.rope import rope_tables
from engine.model_config import ModelArchitecture
from engine.request_table import IntArray

Window = int | None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The items of work of one window in one KV group, on the device."""

    items_IF: torch.Tensor
    merges_RF: torch.Tensor
    counts_2: torch.Tensor
    """int32: the number of items and the number of merges."""


class TritonAttention:
    """Plans the attention of steps; owns memory that all layers share."""

    def __init__(
        self,
        pool: KVPool,
        architecture: ModelArchitecture,
        layer_groups: LayerGroups,
        num_heads: int,
        dtype: torch.dtype,
        limits: StepLimits,
        num_multiprocessors: int,
    ) -> None:
        """`num_heads`: this rank's query heads; `dtype`: that of queries and output. The pool's dtype may differ."""
        shape, device = pool.shape, pool.blocks_NLKHTD.device
        gpu = gpu_of(device)
        self.groups = layer_groups.groups
        self._pool = pool
        self._limits = limits
        self._shape = AttentionShape(
            num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            dtype.itemsize,
            shape.dtype.itemsize,
            has_copy_engine=gpu is None or torch.cuda.get_device_capability(gpu) >= (9, 0),
            shared_bytes=_shared_bytes(gpu),
            latent_rank=None if architecture.latent is None else architecture.latent.rank,
        )
        self._launches = {
            has_chunks: _launch(self._shape, limits, num_multiprocessors, has_chunks=has_chunks)
            for has_chunks in (False, True)
        }
        """The launches for steps without chunks (False) and with chunks (True)."""
        a = architecture
        tables = rope_tables(a.ropes, a.head_dim - a.rotated_from, limits.max_model_len, device)
        kv = [_layer_kv(pool, index, self._shape) for index in range(shape.num_layers)]
        places = [layer_groups.places[layer] for layer in range(a.num_layers)]
        planned = [(group, window) for (group, _), window in zip(places, a.sliding_windows, strict=True)]
        self._planned = tuple(dict.fromkeys(planned))
        """The pairs of group and window for which a step's attention is cut into items."""
        self._layers = [
            AttentionLayer(
                kv[index],
                Softmax(a.attention_scale, window, a.attention_cap),
                group,
                self._planned.index((group, window)),
                table,
            )
            for (group, index), window, table in zip(places, a.sliding_windows, tables, strict=True)
        ]
        num_rows = max(launch.bounds.num_partial_rows for launch in self._launches.values())
        self._partials = Partials.empty(num_rows, self._shape, device)
        merged = (self._launches[False].bounds.num_merges, shape.num_kv_heads)
        self._num_arrived_RH = torch.zeros(merged, dtype=torch.int32, device=device)

    @property
    def block_size(self) -> int:
        return self._shape.block_size

    @property
    def max_staged(self) -> int:
        """The most int32 values that the sections of a step need."""
        bounds = [launch.bounds for launch in self._launches.values()]
        per_plan = max(
            b.num_items * ITEM_FIELDS + b.num_merges * MERGE_FIELDS + 3 * ALIGNMENT for b in bounds
        )
        return len(self._planned) * per_plan + self._max_block_ids + ALIGNMENT

    def sections(self, batch: StepBatch, *, has_chunks: bool, room: int | None) -> list[StagedArray]:
        """The arrays that `bind` needs on the device. `room`: reserves space for a step of `room` tokens; None: for
        this step.

        `has_chunks`: selects the kernel. If False, every request has one token.
        """
        launch = self._launches[has_chunks]
        bounds = (
            None if room is None else plan_bounds(min(room, self._limits.max_num_seqs), room, launch.grid)
        )
        tables = pack_tables(batch, self.groups, self.block_size, launch.grid.keys)
        sections = []
        for plan in self._plans(batch, tables, launch.grid):
            most = bounds or PlanBounds(len(plan.items_IF), len(plan.merges_RF), plan.num_partial_rows)
            sections += [
                StagedArray(np.array([len(plan.items_IF), len(plan.merges_RF)]), 2),
                StagedArray(plan.items_IF, most.num_items * ITEM_FIELDS),
                StagedArray(plan.merges_RF, most.num_merges * MERGE_FIELDS),
            ]
        capacity = len(tables.block_ids_X) if room is None else self._max_block_ids
        return [*sections, StagedArray(tables.block_ids_X, capacity)]

    def bind(
        self,
        positions_T: torch.Tensor,
        slots_GT: Sequence[torch.Tensor],
        sections: Sequence[torch.Tensor],
        *,
        has_chunks: bool,
    ) -> "TritonStepAttention":
        """Attention of the step with these staged `sections`. `slots_GT`: the slots of each KV group."""
        plans = [
            WindowPlan(items.view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS), counts)
            for counts, items, merges in zip(sections[:-1:3], sections[1:-1:3], sections[2:-1:3], strict=True)
        ]
        return TritonStepAttention(
            self._layers,
            self._launches[has_chunks],
            self._shape,
            self._partials,
            self._num_arrived_RH,
            positions_T,
            slots_GT,
            plans,
            sections[-1].unsqueeze(1),
        )

    def clear_tails(self, batch: StepBatch) -> None:
        """Zeroes the slots in `GroupBlocks.new_tails`: kernels multiply masked keys by 0, and 0 x NaN is NaN."""
        for blocks in batch.blocks:
            for block_id, offset in blocks.new_tails:
                self._pool.clear_from(block_id, offset)

    @property
    def _max_block_ids(self) -> int:
        num_keys = max(launch.grid.keys for launch in self._launches.values())
        return most_entries(self._limits, self.groups, self.block_size, num_keys)

    def _plans(self, batch: StepBatch, tables: PackedTables, grid: TileGrid) -> Iterator[AttentionPlan]:
        """Yields a plan for each pair of a group and a window in `_planned`.

        Groups with the same window have equal items, but their own tables.
        """
        made: dict[Window, tuple[AttentionPlan, IntArray]] = {}
        for group, window in self._planned:
            entries_B = tables.first_entries_GB[group]
            if window not in made:
                plan = plan_attention(
                    entries_B, batch.starts_B, batch.num_tokens_B, batch.context_lens_B, grid, window
                )
                made[window] = plan, entries_B
                yield plan
            else:
                plan, of_first_B = made[window]
                yield plan.over_tables(int((entries_B - of_first_B).max(initial=0)))


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is launched, and how its work is cut into items."""

    tuning: AttentionTuning
    grid: TileGrid
    bounds: PlanBounds
    """Bounds of the plans of all steps."""
    merges: bool
    """Whether the kernel itself merges the parts of long contexts. It does not for chunks: their tiles have
    many rows, and the other programs would wait for the program that merges."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's share of the pool, and how it attends."""

    kv: LayerKV | LatentKV
    softmax: Softmax
    group: int
    """The layer's KV group, which determines its slots."""
    plan: int
    """The index of the plan for the layer's group and window, among the step's plans."""
    cos_sin_PD: torch.Tensor
    """Cosines and sines of the layer's rotation; layers with the same rotation share the tensor."""


@dataclass(frozen=True, slots=True)
class TritonStepAttention:
    """The attention of one step; an `Attention` of engine/layers/attention.py."""

    layers: Sequence[AttentionLayer]
    launch: Launch
    shape: AttentionShape
    partials: Partials
    num_arrived_RH: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: Sequence[torch.Tensor]
    plans: Sequence[WindowPlan]
    block_ids_X1: torch.Tensor
    """The packed tables of all groups. An item's first field is the index of its request's first block in them."""

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        of_layer = self.layers[layer]
        if isinstance(of_layer.kv, LatentKV):
            latent_store(
                qkv_TPD,
                self.positions_T,
                self.slots_GT[of_layer.group],
                of_layer.cos_sin_PD,
                of_layer.kv.latents_NSD,
            )
            return self.attend(layer, qkv_TPD[:, :-1])
        rope_store(
            qkv_TPD,
            self.positions_T,
            self.slots_GT[of_layer.group],
            of_layer.cos_sin_PD,
            of_layer.kv.kv_NKHSD,
            q_norm_D=None if head_norm is None else head_norm.q_weight_D,
            k_norm_D=None if head_norm is None else head_norm.k_weight_D,
            eps=0.0 if head_norm is None else head_norm.eps,
        )
        return self.attend(layer, qkv_TPD[:, : self.shape.num_query_heads], sinks_Q)

    def attend(self, layer: int, q_TQD: torch.Tensor, sinks_Q: torch.Tensor | None = None) -> torch.Tensor:
        """Computes only the attention, of rotated queries over the pool: T x (Q x D), or T x (Q x C) over latents."""
        of_layer, launch = self.layers[layer], self.launch
        plan = self.plans[of_layer.plan]
        out_TQD = q_TQD.new_empty(*q_TQD.shape[:2], self.shape.value_dim)
        tables = self.block_ids_X1, plan.items_IF, plan.counts_2[:1]
        if isinstance(of_layer.kv, LatentKV):
            assert sinks_Q is None
            scale, num_programs = of_layer.softmax.scale, launch.grid.num_programs
            latent_attention(
                q_TQD, of_layer.kv, *tables, self.partials, out_TQD, scale, launch.tuning, num_programs
            )
        else:
            paged_attention(
                q_TQD,
                of_layer.kv,
                *tables,
                self.partials,
                out_TQD,
                of_layer.softmax,
                launch.tuning,
                launch.grid.num_programs,
                Merging(plan.merges_RF, self.num_arrived_RH) if launch.merges else None,
                sinks_Q,
            )
        if len(plan.merges_RF) and not launch.merges:
            merge_partials(
                self.partials.out_PQD,
                self.partials.weight_PQ,
                plan.merges_RF,
                plan.counts_2[1:],
                out_TQD,
                launch.grid.num_programs,
                sinks_Q,
            )
        return out_TQD.view(len(out_TQD), -1)


def _launch(
    shape: AttentionShape, limits: StepLimits, num_multiprocessors: int, *, has_chunks: bool
) -> Launch:
    if shape.latent_rank is not None:
        tuning = latent_tuning(shape, has_chunks=has_chunks)
    else:
        tuning = prefill_tuning(shape) if has_chunks else decode_tuning(shape)
    grid = tuning.grid(shape, num_multiprocessors)
    max_tokens = limits.max_num_batched_tokens if has_chunks else limits.max_num_seqs
    # A tile of latents has too many rows for one program to merge.
    merges = not has_chunks and kernel_switches().fused_merge and shape.latent_rank is None
    return Launch(tuning, grid, plan_bounds(limits.max_num_seqs, max_tokens, grid), merges)


def _layer_kv(pool: KVPool, index: int, shape: AttentionShape) -> LayerKV | LatentKV:
    if pool.shape.is_latent:
        return LatentKV(pool.blocks_NLKHTD[:, index, 0, 0], shape)
    return LayerKV(pool.blocks_NLKHTD[:, index], shape)


def _shared_bytes(gpu: torch.device | None) -> int:
    """How much shared memory all programs on one multiprocessor of this GPU can use together."""
    if gpu is None:
        return SHARED_BYTES  # interpreted kernels have no such limit
    properties = driver.active.utils.get_device_properties(gpu.index or 0)
    return int(properties["max_shared_mem"]) - RESERVED_BYTES
