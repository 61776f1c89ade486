"""One pass over the logits: each row's arg max, whether it is finite, and the maxima and sums that draws need.

The vocabulary is cut into parts, one program each. The row's last program merges the parts, so a step of greedy rows
needs this launch only.

Shape suffixes: R rows, V vocabulary, C chunks of a row, S parts of a row, F fields.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_parts import (
    PROCESSED_ROW,
    TEMPERATURE,
    SamplingWorkspace,
    load_field,
    load_float_field,
    load_logits,
)


def row_stats(
    logits_RV: torch.Tensor,
    processed_PV: torch.Tensor | None,
    params_RF: torch.Tensor,
    tokens_R: torch.Tensor,
    is_non_finite_R: torch.Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Writes each row's arg max, the lowest index on ties, to `tokens_R` (int32).

    `is_non_finite_R` (int32) becomes 1 for rows whose logits, before any processing, contain NaN or +inf, or
    only -inf; 0 for all other rows. Fills the workspace's `chunk_max_RC`, `row_max_R` and, if the temperature
    is above 0, `row_sum_R`. NaN counts as +inf, so the arg max is the first NaN or +inf.
    """
    num_rows = logits_RV.shape[0]
    _row_stats_kernel[(workspace.num_parts, num_rows)](
        logits_RV,
        logits_RV if processed_PV is None else processed_PV,
        params_RF,
        tokens_R,
        is_non_finite_R,
        workspace.chunk_max_RC,
        workspace.part_best_RS,
        workspace.part_raw_best_RS,
        workspace.part_token_RS,
        workspace.part_sum_RS,
        workspace.row_max_R,
        workspace.row_sum_R,
        workspace.num_arrived_R,
        logits_RV.stride(0),
        workspace.vocab_size,
        workspace.num_chunks,
        workspace.num_parts,
        CHUNK=workspace.chunk,
        CHUNKS_PER_PART=workspace.chunks_per_part,
        PARTS=triton.next_power_of_2(workspace.num_parts),
        HAS_PROCESSED=processed_PV is not None,
        num_warps=8,  # 16 logits per thread: two loads of 16 bytes in bf16
    )


@triton.jit
def _row_stats_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    processed_ptr,
    params_ptr,
    tokens_ptr,
    is_non_finite_ptr,
    chunk_max_ptr,
    part_best_ptr,
    part_raw_best_ptr,
    part_token_ptr,
    part_sum_ptr,
    row_max_ptr,
    row_sum_ptr,
    num_arrived_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    num_parts,
    CHUNK: tl.constexpr,
    CHUNKS_PER_PART: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1)
    temperature = load_float_field(params_ptr, row, TEMPERATURE)
    processed_row = load_field(params_ptr, row, PROCESSED_ROW)
    chunks_C = part * CHUNKS_PER_PART + tl.arange(0, CHUNKS_PER_PART)
    tokens_CX = chunks_C[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logits_CX = load_logits(
        logits_ptr, processed_ptr, row, processed_row, row_stride, tokens_CX, vocab_size, HAS_PROCESSED
    )
    chunk_max_C = tl.max(logits_CX, 1)
    tl.store(chunk_max_ptr + row * num_chunks + chunks_C, chunk_max_C, chunks_C < num_chunks)
    best = tl.max(chunk_max_C, 0)
    token = tl.min(tl.min(tl.where(logits_CX == best, tokens_CX, vocab_size), 1), 0)
    slot = row * num_parts + part
    tl.store(part_best_ptr + slot, best)
    raw_best = best
    if HAS_PROCESSED:  # noqa: SIM102 - decided when the kernel is compiled
        if processed_row >= 0:
            raw_CX = load_logits(logits_ptr, processed_ptr, row, -1, row_stride, tokens_CX, vocab_size, False)
            raw_best = tl.max(tl.max(raw_CX, 1), 0)
    tl.store(part_raw_best_ptr + slot, raw_best)
    tl.store(part_token_ptr + slot, token)
    if temperature > 0:
        base = tl.where(tl.abs(best) < float("inf"), best, 0.0)  # inf - inf is NaN
        weights_CX = tl.exp(tl.div_rn(logits_CX - base, temperature))
        tl.store(part_sum_ptr + slot, tl.sum(tl.sum(weights_CX, 1), 0))
    # One thread stores the part's scalars and counts the part, with release and acquire order. So the program
    # that counts last sees all parts. After the barrier, its other threads see the parts, too, but only if their
    # loads bypass L1.
    tl.debug_barrier()
    num_before = tl.atomic_add(num_arrived_ptr + row, 1)
    if num_before == num_parts - 1:
        parts_S = tl.arange(0, PARTS)
        slots_S = row * num_parts + parts_S
        mask_S = parts_S < num_parts
        best_S = tl.load(part_best_ptr + slots_S, mask_S, other=float("-inf"), cache_modifier=".cg")
        token_S = tl.load(part_token_ptr + slots_S, mask_S, other=vocab_size, cache_modifier=".cg")
        row_max = tl.max(best_S, 0)
        tl.store(tokens_ptr + row, tl.min(tl.where(best_S == row_max, token_S, vocab_size), 0))
        tl.store(row_max_ptr + row, row_max)
        raw_best_S = tl.load(part_raw_best_ptr + slots_S, mask_S, other=float("-inf"), cache_modifier=".cg")
        is_finite = tl.abs(tl.max(raw_best_S, 0)) < float("inf")
        tl.store(is_non_finite_ptr + row, tl.where(is_finite, 0, 1))
        if temperature > 0:
            sum_S = tl.load(part_sum_ptr + slots_S, mask_S, other=0.0, cache_modifier=".cg")
            base = tl.where(tl.abs(row_max) < float("inf"), row_max, 0.0)
            tl.store(row_sum_ptr + row, tl.sum(sum_S * tl.exp(tl.div_rn(best_S - base, temperature)), 0))
        tl.store(num_arrived_ptr + row, 0)  # for the next launch
