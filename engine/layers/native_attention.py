"""NativeAttention: attention of a mixed step over the paged pool by Baton's CPU kernels; knows no request.

Shape suffixes: T tokens of a step, Q query heads, H kv heads, P = Q + 2 x H, or Q + 1 with a latent, D head dimension,
B requests of a step, M blocks of a table, X positions, F rotated dimensions.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import StepBatch
from engine.kv_cache import KVBlockShape, KVPool
from engine.layers.attention import HeadNorm
from engine.layers.paged_attention import can_store
from engine.layers.rope import rope_tables
from engine.layers.workspace import Workspace
from engine.model_config import ModelArchitecture
from engine.native.attention import (
    HEAD_DIM_MULTIPLE,
    ITEM_FIELDS,
    MAX_HEAD_DIM,
    MERGE_FIELDS,
    TILE_ROWS,
    AttentionKernels,
    Step,
    most_items,
)
from engine.native.types import TYPE_CODES
from engine.request_table import IntArray

CPU = torch.device("cpu")
UNLIMITED = 2**30
"""The window of a layer without a window: more keys than any request has."""
FIRST_POSITIONS = 1024


def is_supported(shape: KVBlockShape, num_heads: int) -> bool:
    """Whether the kernels support this head dimension and this number of query heads per KV head."""
    is_head = shape.head_dim % HEAD_DIM_MULTIPLE == 0 and shape.head_dim <= MAX_HEAD_DIM
    return is_head and num_heads // shape.num_kv_heads <= TILE_ROWS


class NativeAttention:
    """Prepares the attention of steps; owns memory that is reused in every layer.

    A token's result is the same, bit for bit, for any number of threads, with any other requests in the step, and
    wherever the token's chunk begins and ends. A decode is a chunk of one token.

    Bfloat16 activations are multiplied in bfloat16, if the machine has instructions for that; sums and all
    other arithmetic are in float32.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: KVPool,
        architecture: ModelArchitecture,
        num_heads: int,
        dtype: torch.dtype,
        group: int = 0,
    ) -> None:
        """`num_heads`: this rank's query heads. `dtype`: the dtype of activations.

        The pool's dtype may have fewer bits; see `can_store`. `group`: the KV group whose layers this object computes.
        """
        shape = pool.shape
        assert is_supported(shape, num_heads), f"{num_heads} heads in {shape}"
        assert can_store(shape.dtype, dtype), f"{dtype} in a pool of {shape.dtype}"
        self._kernels = AttentionKernels(library)
        self._pool, self._group = pool, group
        self._num_heads = num_heads
        self._dtype = dtype
        self._windows = [min(window or UNLIMITED, UNLIMITED) for window in architecture.sliding_windows]
        self._architecture = architecture
        self._num_rotated = architecture.head_dim - architecture.rotated_from
        self._cos_sin_XF = rope_tables(architecture.ropes, self._num_rotated, FIRST_POSITIONS, CPU)
        self._out, self._partials = Workspace(CPU), Workspace(CPU)

    def prepare(self, batch: StepBatch) -> "NativeStepAttention":
        """Cuts a step's attention into items, once for all layers. Steps share memory, so only one step at a time may
        use it."""
        last_position = int(batch.context_lens_B.max()) - 1
        a = self._architecture
        if last_position >= len(self._cos_sin_XF[0]):
            self._cos_sin_XF = rope_tables(a.ropes, self._num_rotated, 2 * last_position, CPU)
        blocks = batch.blocks[self._group]
        block_ids_BM = np.ascontiguousarray(blocks.block_ids_BM)
        shape = self._pool.shape
        step = Step(
            activation_type=TYPE_CODES[self._dtype],
            pool_type=TYPE_CODES[shape.dtype],
            num_layers=shape.num_layers,
            num_planes=shape.num_planes,
            num_heads=self._num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            rotated_from=a.rotated_from,
            pool=self._pool.blocks_NLKHTD.data_ptr(),
            num_tokens=len(batch.positions_T),
            num_requests=len(batch.starts_B),
            num_decodes=batch.num_decodes,
            max_blocks=block_ids_BM.shape[1],
            num_threads=torch.get_num_threads(),
            positions_T=batch.positions_T.ctypes.data,
            slots_T=blocks.slots_T.ctypes.data,
            starts_B=batch.starts_B.ctypes.data,
            num_tokens_B=batch.num_tokens_B.ctypes.data,
            context_lens_B=batch.context_lens_B.ctypes.data,
            block_ids_BM=block_ids_BM.ctypes.data,
            scale=a.attention_scale,
            cap=a.attention_cap or 0.0,
        )
        most = most_items(batch.num_tokens_B, batch.context_lens_B, self._num_heads, shape.num_kv_heads)
        plans = {window: self._plan(step, window, most) for window in set(self._windows)}
        num_floats = max(plan.num_partials for plan in plans.values())
        return NativeStepAttention(
            self._kernels,
            step,
            (batch, block_ids_BM),
            self._cos_sin_XF,
            [plans[window] for window in self._windows],
            self._partials.borrow(torch.float32, num_floats),
            self._out.borrow(self._dtype, step.num_tokens, self._num_heads * shape.head_dim),
        )

    def _plan(self, step: Step, window: int, most: int) -> "_Plan":
        items, merges = np.empty(most * ITEM_FIELDS, np.int64), np.empty(most * MERGE_FIELDS, np.int64)
        counts = np.empty(3, np.int64)
        self._kernels.plan(
            ctypes.byref(step), window, items.ctypes.data, merges.ctypes.data, counts.ctypes.data
        )
        num_items, num_merges, num_partials = counts.tolist()
        addresses = (items.ctypes.data, num_items, merges.ctypes.data, num_merges)
        return _Plan(window, addresses, num_partials, (items, merges))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The items of work of a step, for all layers with the same window."""

    window: int
    addresses: tuple[int, int, int, int]
    """Address and number of the items, then address and number of the merges."""
    num_partials: int
    """How many floats the partial results take."""
    kept: tuple[IntArray, IntArray]
    """The arrays of items and merges; kept here so that their addresses stay valid."""


class NativeStepAttention:
    """The attention of one step; an `Attention` of engine/layers/attention.py.

    A result is valid until the next layer's call.
    """

    def __init__(
        self,
        kernels: AttentionKernels,
        step: Step,
        kept: tuple[object, ...],
        cos_sin_XF: list[torch.Tensor],
        plans: list[_Plan],
        partials: torch.Tensor,
        out_TX: torch.Tensor,
    ) -> None:
        """`kept`: the objects to whose memory `step` points.

        `cos_sin_XF` and `plans`: one of each per layer.
        """
        self._kernels = kernels
        self._step, self._kept = ctypes.byref(step), kept
        self._cos_sin_XF, self._plans = cos_sin_XF, plans
        self._partials = partials.data_ptr()
        self._out_TX, self._out = out_TX, out_TX.data_ptr()

    def __call__(
        self,
        layer: int,
        qkv_TPD: torch.Tensor,
        head_norm: HeadNorm | None,
        sinks_Q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert qkv_TPD.is_contiguous()
        qkv, plan = qkv_TPD.data_ptr(), self._plans[layer]
        norm = (
            (None, None, 0.0)
            if head_norm is None
            else (head_norm.q_float32_D.data_ptr(), head_norm.k_float32_D.data_ptr(), head_norm.eps)
        )
        self._kernels.rope_store(self._step, layer, self._cos_sin_XF[layer].data_ptr(), qkv, *norm)
        sinks = None if sinks_Q is None else sinks_Q.data_ptr()
        self._kernels.attend(
            self._step, layer, plan.window, qkv, sinks, *plan.addresses, self._partials, self._out
        )
        return self._out_TX
