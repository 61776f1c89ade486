"""Attention of a whole step over paged latents, which all query heads share; knows work items, no requests.

Plan, programs and softmax are the same as in `paged_attention`. But a tile has the query heads of a few
tokens, and one tile of latents is both the keys and the values of all these heads. So a tile is loaded once
for both products (absorbed multi-head latent attention, DeepSeek-V2: https://arxiv.org/abs/2405.04434). A key
also has a rotated part, which is not part of the value.

Shape suffixes: T tokens of the step, Q query heads, C latent, R rotated part, D = C + R, N blocks, S tokens of a block,
B rows of the block table, M its columns, I items, F their fields.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.attention_plan import ITEM_FIELDS
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning
from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.paged_attention import Partials, num_turns_of, unit_of

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class LatentKV:
    """One layer's latents of all blocks, as launches need them; made once, since the pool never moves.

    `latents_NSD` is blocks_NLKHTD[:, layer, 0, 0] of `engine.kv_cache`. Slots after a request's last token are
    multiplied by zero, so they may contain any finite number.
    """

    latents_NSD: torch.Tensor
    shape: AttentionShape

    def __post_init__(self) -> None:
        _, block_size, size = self.latents_NSD.shape
        assert self.shape.latent_rank is not None, "keys and values of heads are for `paged_attention`"
        assert (block_size, size) == (self.shape.block_size, self.shape.head_dim)
        assert self.latents_NSD.stride()[1:] == (size, 1)
        assert self.latents_NSD.stride(0) % (block_size * size) == 0, "a block holds whole layers"
        assert self.latents_NSD.element_size() == self.shape.kv_dtype_bytes

    def operands(
        self, block_n: int
    ) -> "tuple[torch.Tensor, None] | tuple[TensorDescriptor, TensorDescriptor]":
        """The tensor, or the descriptors of latents and of rotated parts, through which the kernel reads."""
        if not self.shape.uses_tma:
            return self.latents_NSD, None
        if block_n not in self._descriptors:
            rank = self.shape.value_dim
            self._descriptors[block_n] = (
                self._descriptor(block_n, 0, rank, self.shape.padded_rank),
                self._descriptor(block_n, rank, self.shape.rotary_dim, self.shape.padded_rotary_dim),
            )
        return self._descriptors[block_n]

    @cached_property
    def _descriptors(self) -> dict[int, tuple[TensorDescriptor, TensorDescriptor]]:
        return {}

    @cached_property
    def block_stride(self) -> int:
        """Distance between blocks: in tokens for the copy engine, else in elements."""
        elements = self.latents_NSD.stride(0)
        return elements // self.shape.head_dim if self.shape.uses_tma else elements

    def _descriptor(self, block_n: int, first: int, size: int, padded_size: int) -> TensorDescriptor:
        """Describes `size` numbers of each token, from number `first` on, in this layer of all blocks.

        Columns after `size` are 0."""
        num_blocks, block_size, stride = self.latents_NSD.shape
        num_rows = (num_blocks - 1) * self.block_stride + block_size
        assert num_rows < 2**31, f"{num_rows} rows: the copy engine counts them in 32 bits"
        columns_NSX = self.latents_NSD[..., first:]
        return TensorDescriptor(columns_NSX, [num_rows, size], [stride, 1], [block_n, padded_size])


def latent_attention(
    q_TQD: torch.Tensor,
    kv: LatentKV,
    block_ids_BM: torch.Tensor,
    items_IF: torch.Tensor,
    num_items: torch.Tensor,
    partials: Partials,
    out_TQC: torch.Tensor,
    scale: float,
    tuning: AttentionTuning,
    num_programs: int,
) -> None:
    """Computes the first `num_items` (a tensor of one int32) of `items_IF` into `out_TQC` and `partials`.

    Writes nothing else. Queries must be projected into the latent space, and end with their rotated part.
    Results are latents. `merge_partials` must merge rows that are split. With an 8-bit cache, bfloat16
    queries become float16 and are clamped to +-65,504. Items must be planned for `tuning.grid` with the same
    `num_programs`. A token's heads are contiguous in queries and output, but tokens need not be contiguous.
    Returns when the launch is queued.
    """
    _, num_query_heads, size = q_TQD.shape
    shape = kv.shape
    assert (num_query_heads, size) == (shape.num_query_heads, shape.head_dim)
    assert q_TQD.stride()[1:] == (size, 1)
    assert out_TQC.stride()[1:] == (shape.value_dim, 1)
    assert block_ids_BM.stride(1) == 1
    assert items_IF.shape[1] == ITEM_FIELDS
    assert items_IF.is_contiguous()
    assert not shape.uses_tma or shape.block_size % tuning.block_n == 0, (
        "the copy engine's loads stay within a block"
    )
    latents, rotated = kv.operands(tuning.block_n)
    _latent_attention_kernel[(num_programs,)](
        q_TQD,
        latents,
        rotated,
        block_ids_BM,
        items_IF,
        num_items,
        partials.out_PQD,
        partials.weight_PQ,
        out_TQC,
        q_TQD.stride(0),
        kv.block_stride,
        block_ids_BM.stride(0),
        out_TQC.stride(0),
        scale * _LOG2_E,
        H=shape.num_groups,
        G=shape.group_size,
        C=shape.value_dim,
        R=shape.rotary_dim,
        BLOCK_SIZE=shape.block_size,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_C=shape.padded_rank,
        BLOCK_R=shape.padded_rotary_dim,
        FIELDS=ITEM_FIELDS,
        USES_TMA=shape.uses_tma,
        TO_FLOAT16=shape.kv_dtype_bytes == 1 and q_TQD.dtype == torch.bfloat16,  # as in `paged_attention`
        # Three TF32 products would need three times as many registers for operands, and would spill.
        PRECISION="ieee" if q_TQD.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        **launch_options(),
    )


@triton.jit
def _latent_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, latents, rotated, block_ids_ptr, items_ptr, num_items_ptr, partial_ptr, weight_ptr, out_ptr,
    q_stride, block_stride, table_stride, out_stride, weight_scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    FIELDS: tl.constexpr, USES_TMA: tl.constexpr, TO_FLOAT16: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """H groups of G heads; a unit of work is an item for one group."""
    D: tl.constexpr = C + R
    rows = tl.arange(0, BLOCK_M)
    query, head_in_group = rows // G, rows % G
    dims, rotated_dims = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)

    # Groups of one item follow one another, so most groups find the item's latents in the L2 cache.
    num_units = tl.load(num_items_ptr) * H  # the step's plan is on the device already
    wait_for_former(PDL, NEXT_STARTS_EARLY=False)
    for turn in range(num_turns_of(num_units)):
        unit = unit_of(turn)
        item_ptr = items_ptr + unit // H * FIELDS
        table_ptr = block_ids_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
        first_row = tl.load(item_ptr + 1)
        num_queries = tl.load(item_ptr + 2)
        first_position = tl.load(item_ptr + 3)
        first_key = tl.load(item_ptr + 4)
        end_key = tl.load(item_ptr + 5)
        partial_row = tl.load(item_ptr + 6)

        # Block ids are loaded one iteration ahead, as in `paged_attention`. Ids past the end are 0: the null block.
        offsets = 0 if USES_TMA else tl.arange(0, BLOCK_N)
        block_ids = tl.load(
            table_ptr + (first_key + offsets) // BLOCK_SIZE, first_key + offsets < end_key, other=0
        )
        has_row = query < num_queries
        position = first_position + query
        step_row = (first_row + query).to(tl.int64)
        heads = unit % H * G + head_in_group
        q_ptrs = q_ptr + (step_row * q_stride + heads * D)[:, None]
        q = tl.load(q_ptrs + dims[None, :], has_row[:, None] & (dims < C)[None, :], other=0.0)
        q_rotated = tl.load(
            q_ptrs + C + rotated_dims[None, :], has_row[:, None] & (rotated_dims < R)[None, :], other=0.0
        )
        if TO_FLOAT16:
            q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
            q_rotated = tl.clamp(q_rotated.to(tl.float32), -65504.0, 65504.0).to(tl.float16)

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for key in tl.range(first_key, end_key, BLOCK_N):
            next_keys = key + BLOCK_N + offsets
            next_block_ids = tl.load(table_ptr + next_keys // BLOCK_SIZE, next_keys < end_key, other=0)
            if USES_TMA:
                row = block_ids * block_stride + key % BLOCK_SIZE
                latent = latents.load([row, 0])
                k_rotated = rotated.load([row, 0])
            else:
                slot = block_ids.to(tl.int64) * block_stride + (key + offsets) % BLOCK_SIZE * D
                latent_ptrs = latents + slot[:, None] + dims[None, :]
                rotated_ptrs = latents + C + slot[:, None] + rotated_dims[None, :]
                if C == BLOCK_C:  # noqa: SIM108 - the compiler would see both
                    latent = tl.load(latent_ptrs)
                else:
                    latent = tl.load(latent_ptrs, (dims < C)[None, :], other=0.0)
                if R == BLOCK_R:
                    k_rotated = tl.load(rotated_ptrs)
                else:
                    k_rotated = tl.load(rotated_ptrs, (rotated_dims < R)[None, :], other=0.0)
            latent = latent.to(q.dtype)
            # This order makes the compiler divide the large product among all warps, not the small one.
            scores = tl.dot(q_rotated, tl.trans(k_rotated.to(q.dtype)), input_precision=PRECISION)
            scores = tl.dot(q, tl.trans(latent), scores, input_precision=PRECISION)
            if key + BLOCK_N > first_position + 1:  # from here on, only some of the queries see a key
                columns = key + tl.arange(0, BLOCK_N)
                scores = tl.where(columns[None, :] <= position[:, None], scores, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(scores, 1) * weight_scale)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # if the row has seen no key yet
            weights = tl.exp2(tl.fma(scores, weight_scale, -shift[:, None]))
            decay = tl.exp2(row_max - shift)
            row_sum = row_sum * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(q.dtype), latent, acc, input_precision=PRECISION)
            row_max = new_max
            block_ids = next_block_ids

        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key: acc is 0, row_max -inf
        acc = acc * (1.0 / row_sum)[:, None]
        in_bounds = has_row[:, None] & (dims < C)[None, :]
        in_token = (heads * C)[:, None] + dims[None, :]
        if partial_row < 0:
            out_ptrs = out_ptr + step_row[:, None] * out_stride + in_token
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), in_bounds)
        else:
            partial_rows = (partial_row + query).to(tl.int64)
            tl.store(partial_ptr + partial_rows[:, None] * (H * G * C) + in_token, acc, in_bounds)
            tl.store(weight_ptr + partial_rows * (H * G) + heads, row_max + tl.log2(row_sum), has_row)
