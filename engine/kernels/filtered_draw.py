"""Completes the draw of each row: finds the winner among the tokens that the filters keep; sorts nothing.

The first candidate is the arg max of score + noise over all tokens. If it is kept, it is also the arg max over the
kept tokens. Otherwise no token of its weight or less is kept, so the next candidate is the arg max over the tokens
that weigh more than it. Whether a token is kept depends on how many tokens weigh more, and on the sum of their
weights. No token is kept whose weight is at most the *floor*. Each round tests four weights at once: the candidate's
weight (or the floor, if this is higher), and three larger weights. For each of them, a pass over the row counts the
tokens that weigh more, and sums their weights. The largest weight that turns out not to be kept becomes the new floor.
The algorithm follows the rejection sampling of FlashInfer ("Sorting-Free GPU Kernels for LLM Sampling", 2025). But
here, noise is a function of the token, instead of new random numbers in each round.

A pass reads only chunks whose likeliest token is above the floor. Most passes are short: a sampled token tends to have
few tokens above it.

Shape suffixes: R rows, V vocabulary, C chunks of a row, G chunks read together, S parts of a row, F fields.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_parts import (
    KEY_0,
    KEY_1,
    MIN_P,
    PROCESSED_ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingWorkspace,
    gumbel_noise,
    load_field,
    load_float_field,
    load_logits,
    to_score,
    to_weight_bits,
)

_ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0, the likeliest token's weight: no weight is larger."""


def filtered_draw(
    logits_RV: torch.Tensor,
    processed_PV: torch.Tensor | None,
    params_RF: torch.Tensor,
    tokens_R: torch.Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Writes the token of each random row to `tokens_R`; call it after `gumbel_draw`.

    Does not change the tokens of greedy rows, or of rows whose largest logit is not finite. One program
    computes a row, and reads only a small part of it. Its loops end, since each round leaves fewer weights
    that may be kept.
    """
    _filtered_draw_kernel[(logits_RV.shape[0],)](
        logits_RV,
        logits_RV if processed_PV is None else processed_PV,
        params_RF,
        tokens_R,
        workspace.chunk_max_RC,
        workspace.active_chunks_RC,
        workspace.part_best_RS,
        workspace.part_token_RS,
        workspace.row_max_R,
        workspace.row_sum_R,
        logits_RV.stride(0),
        workspace.vocab_size,
        workspace.num_chunks,
        workspace.num_parts,
        CHUNK=workspace.chunk,
        GROUP=workspace.chunks_per_part,
        CHUNKS=triton.next_power_of_2(workspace.num_chunks),
        PARTS=triton.next_power_of_2(workspace.num_parts),
        HAS_PROCESSED=processed_PV is not None,
        num_warps=16,  # rows are few: a multiprocessor has about one, whose loads must overlap
    )


@triton.jit
def _filtered_draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    processed_ptr,
    params_ptr,
    tokens_ptr,
    chunk_max_ptr,
    active_ptr,
    part_best_ptr,
    part_token_ptr,
    row_max_ptr,
    row_sum_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    num_parts,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = load_float_field(params_ptr, row, TEMPERATURE)
    row_max = tl.load(row_max_ptr + row)
    if (temperature > 0) & (tl.abs(row_max) < float("inf")):
        parts_S = tl.arange(0, PARTS)
        mask_S = parts_S < num_parts
        best_S = tl.load(part_best_ptr + row * num_parts + parts_S, mask_S, other=float("-inf"))
        token_S = tl.load(part_token_ptr + row * num_parts + parts_S, mask_S, other=vocab_size)
        token = tl.min(tl.where(best_S == tl.max(best_S, 0), token_S, vocab_size), 0)

        top_k = load_field(params_ptr, row, TOP_K)
        top_p = load_float_field(params_ptr, row, TOP_P)
        min_p = load_float_field(params_ptr, row, MIN_P)
        if (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0):
            chunks_C = tl.arange(0, CHUNKS)
            mask_C = chunks_C < num_chunks
            chunk_max_C = tl.load(chunk_max_ptr + row * num_chunks + chunks_C, mask_C, other=float("-inf"))
            chunk_bits_C = to_weight_bits(to_score(chunk_max_C, row_max, temperature))
            chunk_bits_C = tl.where(mask_C, chunk_bits_C, -1)
            processed_row = load_field(params_ptr, row, PROCESSED_ROW)
            row_active_ptr = active_ptr + row * num_chunks
            source = (
                logits_ptr,
                processed_ptr,
                row,
                processed_row,
                row_stride,
                vocab_size,
                row_max,
                temperature,
            )

            # No weight below `lowest` is kept. The k likeliest chunks contain at least k tokens that weigh no less than
            # the k-th of these chunks' largest weights.
            lowest = min_p.to(tl.int32, bitcast=True)
            lowest_of_top_k = tl.full([], 0, tl.int32)
            if top_k <= num_chunks:
                lowest_of_top_k = _kth_largest(chunk_bits_C, top_k)
            mass_limit = tl.full([], float("inf"), tl.float32)
            if top_p < 1.0:
                mass = tl.load(row_sum_ptr + row)
                if top_k < vocab_size:
                    mass = _top_k_mass(
                        source,
                        chunk_bits_C,
                        row_active_ptr,
                        num_chunks,
                        top_k,
                        lowest_of_top_k,
                        CHUNK,
                        GROUP,
                        HAS_PROCESSED,
                    )
                mass_limit = top_p * mass
            lowest = tl.maximum(lowest, lowest_of_top_k)

            bits = _token_bits(source, token, HAS_PROCESSED)
            is_kept = bits < 0  # not known yet
            while is_kept == 0:
                floor = tl.maximum(bits, lowest - 1)
                step = (_ONE_BITS - floor) // 4
                n_0, n_1, n_2, n_3, mass_0, mass_1, mass_2, mass_3 = _count_above(
                    source, chunk_bits_C, row_active_ptr, num_chunks, floor, step, CHUNK, GROUP, HAS_PROCESSED
                )
                is_kept = (bits >= lowest) & (n_0 < top_k) & ((mass_0 < mass_limit) | (n_0 == 0))
                if is_kept == 0:
                    lowest = floor + 1
                    if (n_1 >= top_k) | ((mass_1 >= mass_limit) & (n_1 > 0)):
                        lowest = floor + step + 1
                    if (n_2 >= top_k) | ((mass_2 >= mass_limit) & (n_2 > 0)):
                        lowest = floor + 2 * step + 1
                    if (n_3 >= top_k) | ((mass_3 >= mass_limit) & (n_3 > 0)):
                        lowest = floor + 3 * step + 1
                    token = _draw_from(
                        source, chunk_bits_C, row_active_ptr, num_chunks, lowest,
                        load_field(params_ptr, row, KEY_0), load_field(params_ptr, row, KEY_1),
                        CHUNK, GROUP, HAS_PROCESSED,
                    )  # fmt: skip
                    bits = _token_bits(source, token, HAS_PROCESSED)
        tl.store(tokens_ptr + row, token)


@triton.jit
def _token_bits(source, token, HAS_PROCESSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight of one token."""
    logits_ptr, processed_ptr, row, processed_row, row_stride, vocab_size, row_max, temperature = source
    logit = load_logits(
        logits_ptr, processed_ptr, row, processed_row, row_stride, token, vocab_size, HAS_PROCESSED
    )
    return to_weight_bits(to_score(logit, row_max, temperature))


@triton.jit
def _kth_largest(bits_C, k):  # type: ignore[no-untyped-def]
    """The k-th largest of at least k weights. Halves the range in question, 30 times."""
    low = tl.full([], -1, tl.int32)  # at least k are above it
    high = tl.full([], _ONE_BITS, tl.int32)  # fewer than k are above it
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((bits_C > middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle
    return high


@triton.jit
def _activate(chunk_bits_C, floor, row_active_ptr):  # type: ignore[no-untyped-def]
    """Lists the chunks that have a weight above `floor`; returns their number."""
    is_active_C = chunk_bits_C > floor
    slots_C = tl.cumsum(is_active_C.to(tl.int32), 0) - 1
    tl.debug_barrier()  # no thread still reads the previous list
    tl.store(row_active_ptr + slots_C, tl.arange(0, chunk_bits_C.shape[0]), is_active_C)
    tl.debug_barrier()
    return tl.sum(is_active_C.to(tl.int32), 0)


@triton.jit
def _load_group(  # type: ignore[no-untyped-def]
    source,
    row_active_ptr,
    start,
    num_active,
    num_chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    """Tokens and scores of the next chunks in the list. Scores past the end of the list are -inf."""
    logits_ptr, processed_ptr, row, processed_row, row_stride, vocab_size, row_max, temperature = source
    slots_G = start + tl.arange(0, GROUP)
    chunks_G = tl.load(row_active_ptr + slots_G, slots_G < num_active, other=num_chunks)
    tokens_GX = chunks_G[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logits_GX = load_logits(
        logits_ptr, processed_ptr, row, processed_row, row_stride, tokens_GX, vocab_size, HAS_PROCESSED
    )
    return tokens_GX, to_score(logits_GX, row_max, temperature)


@triton.jit
def _count_above(  # type: ignore[no-untyped-def]
    source,
    chunk_bits_C,
    row_active_ptr,
    num_chunks,
    floor,
    step,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    """The numbers of tokens whose weights exceed `floor` + 0, 1, 2 and 3 steps; then the sums of their weights."""
    _, _, _, _, _, vocab_size, _, _ = source
    n_0 = tl.zeros([GROUP], tl.int32)
    n_1, n_2, n_3 = n_0, n_0, n_0
    mass_0 = tl.zeros([GROUP], tl.float32)
    mass_1, mass_2, mass_3 = mass_0, mass_0, mass_0
    num_active = _activate(chunk_bits_C, floor, row_active_ptr)
    start = tl.full([], 0, tl.int32)
    while start < num_active:
        tokens_GX, scores_GX = _load_group(
            source, row_active_ptr, start, num_active, num_chunks, CHUNK, GROUP, HAS_PROCESSED
        )
        weights_GX = tl.exp(scores_GX)
        bits_GX = weights_GX.to(tl.int32, bitcast=True)
        bits_GX = tl.where(tokens_GX < vocab_size, bits_GX, -1)
        n_0 += tl.sum((bits_GX > floor).to(tl.int32), 1)
        n_1 += tl.sum((bits_GX > floor + step).to(tl.int32), 1)
        n_2 += tl.sum((bits_GX > floor + 2 * step).to(tl.int32), 1)
        n_3 += tl.sum((bits_GX > floor + 3 * step).to(tl.int32), 1)
        mass_0 += tl.sum(tl.where(bits_GX > floor, weights_GX, 0.0), 1)
        mass_1 += tl.sum(tl.where(bits_GX > floor + step, weights_GX, 0.0), 1)
        mass_2 += tl.sum(tl.where(bits_GX > floor + 2 * step, weights_GX, 0.0), 1)
        mass_3 += tl.sum(tl.where(bits_GX > floor + 3 * step, weights_GX, 0.0), 1)
        start += GROUP
    return (
        tl.sum(n_0, 0),
        tl.sum(n_1, 0),
        tl.sum(n_2, 0),
        tl.sum(n_3, 0),
        tl.sum(mass_0, 0),
        tl.sum(mass_1, 0),
        tl.sum(mass_2, 0),
        tl.sum(mass_3, 0),
    )


@triton.jit
def _top_k_mass(  # type: ignore[no-untyped-def]
    source,
    chunk_bits_C,
    row_active_ptr,
    num_chunks,
    top_k,
    lowest,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    """The sum of the k largest weights, for k below the vocabulary's size. If further weights equal the k-th, they
    do not count.

    Narrows down the range of the k-th largest weight, which is at least `lowest`. Ends when exactly k tokens are above
    some weight in the range, or when one weight is left. Each round divides the range of the floats' bits by 5, and so
    nearly the range of their logarithms.
    """
    low = lowest - 1  # at least k are above it
    high = tl.full(
        [], _ONE_BITS, tl.int32
    )  # fewer than k are above it: `num_above`, of the mass `mass_above`
    num_above = tl.full([], 0, tl.int32)
    mass_above = tl.full([], 0.0, tl.float32)
    mass = tl.full([], -1.0, tl.float32)  # not known yet
    while mass < 0:
        if high - low == 1:
            mass = mass_above + (top_k - num_above).to(tl.float32) * high.to(tl.float32, bitcast=True)
        else:
            step = tl.maximum((high - low) // 5, 1)
            first = low + step
            n_0, n_1, n_2, n_3, mass_0, mass_1, mass_2, mass_3 = _count_above(
                source, chunk_bits_C, row_active_ptr, num_chunks, first, step, CHUNK, GROUP, HAS_PROCESSED
            )
            # `low`: the largest tested weight with at least k weights above it; `high`: the smallest with fewer.
            if n_3 >= top_k:
                low = first + 3 * step
            elif n_2 >= top_k:
                low = first + 2 * step
            elif n_1 >= top_k:
                low = first + step
            elif n_0 >= top_k:
                low = first
            if n_0 < top_k:
                high, num_above, mass_above = first, n_0, mass_0
            elif n_1 < top_k:
                high, num_above, mass_above = first + step, n_1, mass_1
            elif n_2 < top_k:
                high, num_above, mass_above = first + 2 * step, n_2, mass_2
            elif n_3 < top_k:
                high, num_above, mass_above = first + 3 * step, n_3, mass_3
            if n_0 == top_k:
                mass = mass_0
            elif n_1 == top_k:
                mass = mass_1
            elif n_2 == top_k:
                mass = mass_2
            elif n_3 == top_k:
                mass = mass_3
    return mass


@triton.jit
def _draw_from(  # type: ignore[no-untyped-def]
    source,
    chunk_bits_C,
    row_active_ptr,
    num_chunks,
    lowest,
    key_0,
    key_1,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
):
    """The arg max of score + noise over the tokens that weigh `lowest` or more, the lowest token on ties."""
    _, _, _, _, _, vocab_size, _, _ = source
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    num_active = _activate(chunk_bits_C, lowest - 1, row_active_ptr)
    start = tl.full([], 0, tl.int32)
    while start < num_active:
        tokens_GX, scores_GX = _load_group(
            source, row_active_ptr, start, num_active, num_chunks, CHUNK, GROUP, HAS_PROCESSED
        )
        values_GX = scores_GX + gumbel_noise(tokens_GX, key_0, key_1)
        values_GX = tl.where(to_weight_bits(scores_GX) >= lowest, values_GX, float("-inf"))
        group_best = tl.max(tl.max(values_GX, 1), 0)
        group_token = tl.min(tl.min(tl.where(values_GX == group_best, tokens_GX, vocab_size), 1), 0)
        if group_best > best:  # groups come in the order of tokens, so of equal values the lowest token stays
            best = group_best
            token = group_token
        start += GROUP
    return token
