"""Draws from all tokens of each row: the arg max of score + Gumbel noise in each part of the row.

Noise is bounded, so a part whose largest score is far below score + noise of the likeliest token cannot contain the
winner. Such a part is not read. At low temperatures, this applies to most parts.

Shape suffixes: R rows, V vocabulary, C chunks of a row, S parts of a row, F fields.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_parts import (
    KEY_0,
    KEY_1,
    PROCESSED_ROW,
    TEMPERATURE,
    SamplingWorkspace,
    gumbel_noise,
    load_field,
    load_float_field,
    load_logits,
    to_score,
)

_MAX_NOISE = tl.constexpr(16.7)
"""More than -log(-log(1 - 2^-24)) = 16.64, the largest noise of engine/counter_rng.py."""


def gumbel_draw(
    logits_RV: torch.Tensor,
    processed_PV: torch.Tensor | None,
    params_RF: torch.Tensor,
    tokens_R: torch.Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Writes each part's largest score with noise, and its token, to the workspace.

    Call it after `row_stats`, which writes each row's arg max to `tokens_R`. Results are in `part_best_RS`
    and `part_token_RS`. Skips greedy rows, and rows whose largest logit is not finite.
    """
    _gumbel_draw_kernel[(workspace.num_parts, logits_RV.shape[0])](
        logits_RV,
        logits_RV if processed_PV is None else processed_PV,
        params_RF,
        tokens_R,
        workspace.chunk_max_RC,
        workspace.row_max_R,
        workspace.part_best_RS,
        workspace.part_token_RS,
        logits_RV.stride(0),
        workspace.vocab_size,
        workspace.num_chunks,
        workspace.num_parts,
        CHUNK=workspace.chunk,
        CHUNKS_PER_PART=workspace.chunks_per_part,
        HAS_PROCESSED=processed_PV is not None,
        num_warps=8,
    )


@triton.jit
def _gumbel_draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    processed_ptr,
    params_ptr,
    tokens_ptr,
    chunk_max_ptr,
    row_max_ptr,
    part_best_ptr,
    part_token_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    num_parts,
    CHUNK: tl.constexpr,
    CHUNKS_PER_PART: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1)
    temperature = load_float_field(params_ptr, row, TEMPERATURE)
    row_max = tl.load(row_max_ptr + row)
    if (temperature > 0) & (tl.abs(row_max) < float("inf")):
        key_0 = load_field(params_ptr, row, KEY_0)
        key_1 = load_field(params_ptr, row, KEY_1)
        chunks_C = part * CHUNKS_PER_PART + tl.arange(0, CHUNKS_PER_PART)
        chunk_max_C = tl.load(
            chunk_max_ptr + row * num_chunks + chunks_C, chunks_C < num_chunks, other=float("-inf")
        )
        best = tl.full([], float("-inf"), tl.float32)
        token = part * CHUNKS_PER_PART * CHUNK
        best_score = to_score(tl.max(chunk_max_C, 0), row_max, temperature)
        # Score + noise of the likeliest token, whose score is 0.
        value_to_beat = gumbel_noise(tl.load(tokens_ptr + row), key_0, key_1)
        if best_score + _MAX_NOISE >= value_to_beat:
            processed_row = load_field(params_ptr, row, PROCESSED_ROW)
            tokens_CX = chunks_C[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            logits_CX = load_logits(
                logits_ptr,
                processed_ptr,
                row,
                processed_row,
                row_stride,
                tokens_CX,
                vocab_size,
                HAS_PROCESSED,
            )
            noise_CX = gumbel_noise(tokens_CX, key_0, key_1)
            values_CX = to_score(logits_CX, row_max, temperature) + noise_CX
            best = tl.max(tl.max(values_CX, 1), 0)
            token = tl.min(tl.min(tl.where(values_CX == best, tokens_CX, vocab_size), 1), 0)
        tl.store(part_best_ptr + row * num_parts + part, best)
        tl.store(part_token_ptr + row * num_parts + part, token)
