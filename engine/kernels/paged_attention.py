"""Attention of a whole step over the paged KV cache, in one persistent launch; knows work items, no requests.

A fixed number of programs shares the items of `attention_plan.py`; each item is computed for every kv head.
The device reads the number of items, so one captured CUDA graph can be used for any contexts. Within a tile
the algorithm is FlashAttention-2 (https://arxiv.org/abs/2307.08691): scores stay on the multiprocessor, and
the softmax is computed online and in base 2. The query heads of a kv head share a tile, so keys and values
are read once for all of them.

Shape suffixes: T tokens of the step, Q query heads, D head dimension, N blocks, K the pair (keys, values), H kv heads,
S tokens of a block, B rows of the block table, M its columns, I items, F their fields, P rows of partial results.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.attention_plan import ITEM_FIELDS, MERGE_FIELDS
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning
from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.merge_partials import add_sinks, merge_row

_LOG2_E = math.log2(math.e)

MAX_MERGED_ELEMENTS = 8192
"""How many elements of parts a program reads at a time when it merges. They take 64 registers in each of 128 threads,
which are free by then."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """How scores become weights."""

    scale: float
    window: int | None = None
    """If set, a query attends only to this many keys: its own and those before it."""
    cap: float | None = None
    """If set, a scaled score s becomes cap x tanh(s / cap)."""

    def __post_init__(self) -> None:
        assert self.scale > 0
        assert self.cap is None or self.cap > 0
        assert self.window is None or self.window > 0


@dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values of all blocks, as launches need them; made once, since the pool never moves.

    `kv_NKHSD` is blocks_NLKHTD[:, layer] of `engine.kv_cache`. Slots after a request's last token are multiplied by
    zero, so they may contain any finite number. The engine clears them when a request gets the block.
    """

    kv_NKHSD: torch.Tensor
    shape: AttentionShape

    def __post_init__(self) -> None:
        _, pair, num_heads, block_size, head_dim = self.kv_NKHSD.shape
        shape, head_stride = self.shape, block_size * head_dim
        assert (num_heads, block_size, head_dim) == (shape.num_kv_heads, shape.block_size, shape.head_dim)
        assert self.kv_NKHSD.stride()[1:] == (num_heads * head_stride, head_stride, head_dim, 1)
        assert pair == 2
        assert self.kv_NKHSD.stride(0) % (2 * num_heads * head_stride) == 0, "a block holds whole layers"
        assert self.kv_NKHSD.element_size() == shape.kv_dtype_bytes

    def operand(self, block_n: int) -> "torch.Tensor | TensorDescriptor":
        """The tensor or the descriptor through which the kernel reads keys and values."""
        if not self.shape.uses_tma:
            return self.kv_NKHSD
        if block_n not in self._descriptors:
            self._descriptors[block_n] = self._descriptor(block_n)
        return self._descriptors[block_n]

    @cached_property
    def _descriptors(self) -> dict[int, TensorDescriptor]:
        return {}

    @cached_property
    def block_stride(self) -> int:
        """Distance between blocks: in rows of a token's key or value for the copy engine, else in elements."""
        elements = self.kv_NKHSD.stride(0)
        return elements // self.shape.head_dim if self.shape.uses_tma else elements

    def _descriptor(self, block_n: int) -> TensorDescriptor:
        """Describes all rows from this layer's start in the first block to its end in the last block. Columns past D
        are 0."""
        num_blocks, _, num_heads, block_size, head_dim = self.kv_NKHSD.shape
        num_rows = (num_blocks - 1) * self.block_stride + 2 * num_heads * block_size
        assert num_rows < 2**31, f"{num_rows} rows: the copy engine counts them in 32 bits"
        columns = self.shape.padded_head_dim
        return TensorDescriptor(self.kv_NKHSD, [num_rows, head_dim], [head_dim, 1], [block_n, columns])


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of items that share their queries with other items: normalized, with the log2 of their weights."""

    out_PQD: torch.Tensor
    """float32."""
    weight_PQ: torch.Tensor
    """float32; -inf if a query attends to no key of its item."""

    @classmethod
    def empty(cls, num_rows: int, shape: AttentionShape, device: torch.device) -> "Partials":
        out_PQD = torch.empty((max(1, num_rows), shape.num_query_heads, shape.value_dim), device=device)
        return cls(out_PQD, torch.empty(out_PQD.shape[:2], device=device))


@dataclass(frozen=True, slots=True)
class Merging:
    """Makes the launch merge: for each tile and kv head, the program that ends last merges the parts."""

    merges_RF: torch.Tensor
    num_arrived_RH: torch.Tensor
    """int32: how many programs have ended; 0 before and after a launch. Consecutive launches share the
    tensor."""


def paged_attention(
    q_TQD: torch.Tensor,
    kv: LayerKV,
    block_ids_BM: torch.Tensor,
    items_IF: torch.Tensor,
    num_items: torch.Tensor,
    partials: Partials,
    out_TQD: torch.Tensor,
    softmax: Softmax,
    tuning: AttentionTuning,
    num_programs: int,
    merging: Merging | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> None:
    """Computes the first `num_items` (a tensor of one int32) of `items_IF` into `out_TQD` and `partials`.

    Writes nothing else. `merge_partials` must merge rows that are split, unless `merging` merges them in this
    launch. With an 8-bit cache, bfloat16 queries become float16 and are clamped to +-65,504. Items must be
    planned for `tuning.grid` with the same window and `num_programs`. A token's heads are contiguous in
    queries and output, but tokens need not be contiguous. `sinks_Q` (float32): one logit per query head,
    which takes part in the softmax but has no value. Partial results do not contain the sinks:
    `merge_partials` adds them. Returns when the launch is queued.
    """
    _, num_query_heads, head_dim = q_TQD.shape
    shape = kv.shape
    assert (num_query_heads, head_dim) == (shape.num_query_heads, shape.head_dim)
    assert q_TQD.stride(1) == out_TQD.stride(1) == head_dim
    assert q_TQD.stride(2) == out_TQD.stride(2) == 1
    assert block_ids_BM.stride(1) == 1
    assert items_IF.shape[1] == ITEM_FIELDS
    assert items_IF.is_contiguous()
    assert not shape.uses_tma or shape.block_size % tuning.block_n == 0, (
        "the copy engine's loads stay within a block"
    )
    if merging is not None:
        assert merging.merges_RF.is_contiguous()
        assert merging.merges_RF.shape[1] == MERGE_FIELDS
        assert merging.num_arrived_RH.is_contiguous()
        assert merging.num_arrived_RH.shape[1] == shape.num_kv_heads
        assert len(merging.num_arrived_RH) >= len(merging.merges_RF)
    padded_group = triton.next_power_of_2(shape.group_size)
    _paged_attention_kernel[(num_programs,)](
        q_TQD,
        kv.operand(tuning.block_n),
        block_ids_BM,
        items_IF,
        num_items,
        partials.out_PQD,
        partials.weight_PQ,
        out_TQD,
        sinks_Q,
        None if merging is None else merging.merges_RF,
        None if merging is None else merging.num_arrived_RH,
        q_TQD.stride(0),
        kv.block_stride,
        block_ids_BM.stride(0),
        out_TQD.stride(0),
        (softmax.scale if softmax.cap is None else softmax.cap) * _LOG2_E,
        softmax.window or 0,
        H=shape.num_kv_heads,
        G=shape.group_size,
        D=head_dim,
        BLOCK_SIZE=shape.block_size,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_D=shape.padded_head_dim,
        FIELDS=ITEM_FIELDS,
        MERGE_FIELDS=MERGE_FIELDS,
        PADDED_G=padded_group,
        MERGED_PARTS=max(1, min(16, MAX_MERGED_ELEMENTS // (padded_group * shape.padded_head_dim))),
        USES_TMA=shape.uses_tma,
        HAS_WINDOW=softmax.window is not None,
        TANH_SCALE=None if softmax.cap is None else 2 * _LOG2_E * softmax.scale / softmax.cap,
        # One instruction converts two 8-bit numbers to float16; bfloat16 needs several. float16 represents
        # all 8-bit floats exactly, too.
        TO_FLOAT16=shape.kv_dtype_bytes == 1 and q_TQD.dtype == torch.bfloat16,
        PRECISION="tf32x3" if q_TQD.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        **launch_options(),
    )


def paged_attention_reference(
    q_TQD: torch.Tensor,
    kv_NKHSD: torch.Tensor,
    block_ids_BM: torch.Tensor,
    num_queries_B: list[int],
    context_lengths_B: list[int],
    softmax: Softmax,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` in torch, step by step in float64, rounded once; the requests' queries are consecutive."""
    out_TQD = torch.empty(q_TQD.shape, dtype=q_TQD.dtype, device=q_TQD.device)
    group_size, first_row = q_TQD.shape[1] // kv_NKHSD.shape[2], 0
    for block_ids_M, num_queries, num_keys in zip(
        block_ids_BM, num_queries_B, context_lengths_B, strict=True
    ):
        rows = slice(first_row, first_row + num_queries)
        kv_MKHSD = kv_NKHSD[block_ids_M.long()].to(torch.float64)
        kv_KQCD = (
            kv_MKHSD.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys].repeat_interleave(group_size, 1)
        )
        scores_QTC = q_TQD[rows].to(torch.float64).transpose(0, 1) @ kv_KQCD[0].transpose(1, 2)
        scores_QTC *= softmax.scale
        if softmax.cap is not None:
            scores_QTC = softmax.cap * torch.tanh(scores_QTC / softmax.cap)
        keys_C = torch.arange(num_keys, device=q_TQD.device)
        positions_T1 = keys_C[num_keys - num_queries :, None]
        hidden_TC = keys_C > positions_T1
        if softmax.window is not None:
            hidden_TC |= keys_C <= positions_T1 - softmax.window
        scores_QTC = scores_QTC.masked_fill(hidden_TC, -math.inf)
        if sinks_Q is not None:  # one more column, whose weights are left out
            sinks_QT1 = sinks_Q.to(torch.float64).view(-1, 1, 1).expand(-1, num_queries, 1)
            scores_QTC = torch.cat((scores_QTC, sinks_QT1), -1)
        weights_QTC = torch.softmax(scores_QTC, -1)[..., :num_keys]
        out_TQD[rows] = (weights_QTC @ kv_KQCD[1]).transpose(0, 1).to(q_TQD.dtype)
        first_row += num_queries
    return out_TQD


@triton.jit
def num_turns_of(num_units):  # type: ignore[no-untyped-def]
    """How many units this program takes. Programs take units in turns, and every second turn in reverse order. So after
    a long unit, each program gets a short unit."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_turns = num_units // num_programs
    last_place = tl.where(num_turns % 2 == 0, program, num_programs - 1 - program)
    return num_turns + (last_place < num_units % num_programs).to(tl.int32)


@triton.jit
def unit_of(turn):  # type: ignore[no-untyped-def]
    """The unit that this program takes in this turn."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    return turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)


@triton.jit
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv, block_ids_ptr, items_ptr, num_items_ptr, partial_ptr, weight_ptr, out_ptr, sinks_ptr,
    merges_ptr, num_arrived_ptr,
    q_stride, block_stride, table_stride, out_stride, weight_scale, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FIELDS: tl.constexpr,
    MERGE_FIELDS: tl.constexpr, PADDED_G: tl.constexpr, MERGED_PARTS: tl.constexpr,
    USES_TMA: tl.constexpr, HAS_WINDOW: tl.constexpr, TANH_SCALE: tl.constexpr, TO_FLOAT16: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    query, head_in_group = rows // G, rows % G
    dims = tl.arange(0, BLOCK_D)

    num_units = tl.load(num_items_ptr) * H  # the step's plan is on the device already
    wait_for_former(PDL, NEXT_STARTS_EARLY=False)
    for turn in range(num_turns_of(num_units)):
        unit = unit_of(turn)
        head = unit % H
        item_ptr = items_ptr + unit // H * FIELDS
        table_ptr = block_ids_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
        first_row = tl.load(item_ptr + 1)
        num_queries = tl.load(item_ptr + 2)
        first_position = tl.load(item_ptr + 3)
        first_key = tl.load(item_ptr + 4)
        end_key = tl.load(item_ptr + 5)
        partial_row = tl.load(item_ptr + 6)

        # Block ids are loaded one iteration ahead: if keys waited for ids of the same iteration, the pipeline would be
        # half as deep.
        offsets = 0 if USES_TMA else tl.arange(0, BLOCK_N)
        block_ids = tl.load(
            table_ptr + (first_key + offsets) // BLOCK_SIZE, first_key + offsets < end_key, other=0
        )
        has_row = query < num_queries
        position = first_position + query
        # From `masked_from` on, and before `masked_before`, only some of the queries see a key.
        masked_from = first_position + 1
        masked_before = first_position + num_queries - window
        step_row = (first_row + query).to(tl.int64)
        in_token = (head * G + head_in_group)[:, None] * D + dims[None, :]
        in_bounds = has_row[:, None] & (dims < D)[None, :]
        q = tl.load(q_ptr + step_row[:, None] * q_stride + in_token, in_bounds, other=0.0)
        if TO_FLOAT16:
            q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for key in tl.range(first_key, end_key, BLOCK_N):
            next_keys = key + BLOCK_N + offsets
            # Ids past the end are 0: the null block, which may be read.
            next_block_ids = tl.load(table_ptr + next_keys // BLOCK_SIZE, next_keys < end_key, other=0)
            if USES_TMA:
                row = block_ids * block_stride + head * BLOCK_SIZE + key % BLOCK_SIZE
                k = kv.load([row, 0])
                v = kv.load([row + H * BLOCK_SIZE, 0])
            else:
                in_head = head * (BLOCK_SIZE * D) + (key + offsets) % BLOCK_SIZE * D
                slot = block_ids.to(tl.int64) * block_stride + in_head
                kv_ptrs = kv + slot[:, None] + dims[None, :]
                if D == BLOCK_D:
                    k = tl.load(kv_ptrs)
                    v = tl.load(kv_ptrs + H * BLOCK_SIZE * D)
                else:
                    k = tl.load(kv_ptrs, (dims < D)[None, :], other=0.0)
                    v = tl.load(kv_ptrs + H * BLOCK_SIZE * D, (dims < D)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            if TANH_SCALE is not None:  # a score becomes its tanh: 1 - 2 / (e^2x + 1)
                scores = 1.0 - 2.0 / (tl.exp2(scores * TANH_SCALE) + 1.0)
            is_masked = key + BLOCK_N > masked_from
            if HAS_WINDOW:
                is_masked |= key < masked_before
            if is_masked:
                columns = key + tl.arange(0, BLOCK_N)
                visible = columns[None, :] <= position[:, None]
                if HAS_WINDOW:
                    visible &= columns[None, :] > (position - window)[:, None]
                scores = tl.where(visible, scores, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(scores, 1) * weight_scale)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # if the row has seen no key yet
            weights = tl.exp2(tl.fma(scores, weight_scale, -shift[:, None]))
            decay = tl.exp2(row_max - shift)
            row_sum = row_sum * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
            row_max = new_max
            block_ids = next_block_ids

        if sinks_ptr is not None:  # noqa: SIM102 - known at compile time; the next condition at run time
            if partial_row < 0:
                row_sum = add_sinks(row_sum, row_max, sinks_ptr, head * G + head_in_group, has_row)
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key: acc is 0, row_max -inf
        acc = acc * (1.0 / row_sum)[:, None]
        if partial_row < 0:
            out_ptrs = out_ptr + step_row[:, None] * out_stride + in_token
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), in_bounds)
        else:
            partial_rows = (partial_row + query).to(tl.int64)
            tl.store(partial_ptr + partial_rows[:, None] * (H * G * D) + in_token, acc, in_bounds)
            weight_ptrs = weight_ptr + partial_rows * (H * G) + head * G + head_in_group
            tl.store(weight_ptrs, row_max + tl.log2(row_sum), has_row)
            if num_arrived_ptr is not None:
                # All threads have written their parts before one thread counts the program, with release and acquire
                # order. So the program that counts last sees all parts.
                tl.debug_barrier()
                merge = tl.load(item_ptr + 7)
                merge_ptr = merges_ptr + merge * MERGE_FIELDS
                arrived_ptr = num_arrived_ptr + merge * H + head
                num_before = tl.atomic_add(arrived_ptr, 1)
                if num_before == tl.load(merge_ptr + 2) - 1:
                    for index in range(num_queries):
                        merge_row(
                            partial_ptr, weight_ptr, merge_ptr + index * MERGE_FIELDS, head * G, G, out_ptr, sinks_ptr,
                            out_stride, H * G, D, PADDED_G, MERGED_PARTS, BLOCK_D,
                        )  # fmt: skip
                    tl.store(arrived_ptr, 0)  # for the next launch
