"""Common to the sampling kernels: rows' parameters, logits, scores, noise, and memory between launches.

A token's *score* is (logit - largest logit) / temperature; its *weight* is exp(score), at most 1. Weights are compared
by their bits: non-negative floats have the same order as their bits read as 32-bit integers.

Shape suffixes: R rows, V vocabulary, C chunks of a row, S parts of a row (a program's share), F fields.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NUM_FIELDS = 8
"""int32 words of parameters per row, 32 bytes: temperature, top_k, top_p, min_p, the two keys of the row's noise
(engine/counter_rng.py), the row of its processed logits or -1, and an unused word. The floats are stored as their bits.
Temperature 0 is greedy; a top_k of the vocabulary's size or more keeps every token."""
TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
KEY_0 = tl.constexpr(4)
KEY_1 = tl.constexpr(5)
PROCESSED_ROW = tl.constexpr(6)
_NUM_FIELDS = tl.constexpr(NUM_FIELDS)

CHUNK = 256
"""Tokens per chunk: in bf16, 16 bytes for each lane of a warp. The largest logit of each chunk is stored."""
CHUNKS_PER_PART = 16
"""A program reads 4,096 logits. One row of 128,256 then keeps 32 multiprocessors busy, and five rows keep all 132 of an
H200 busy; a single multiprocessor would need about 50 us for a row's noise. The number is the same for any number of
rows, so that the sums, and with them the tokens, are the same in any batch."""


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Memory that one launch leaves for the next, for up to R rows of V logits; used by one stream at a time."""

    vocab_size: int
    chunk: int
    chunks_per_part: int
    chunk_max_RC: torch.Tensor
    """Largest logit of each chunk, float32."""
    active_chunks_RC: torch.Tensor
    """Chunks that the row's program reads at present, int32."""
    part_best_RS: torch.Tensor
    """float32: after `row_stats`, the largest logit of each part; after `gumbel_draw`, its largest score + noise."""
    part_token_RS: torch.Tensor
    """int32: the token with the value in `part_best_RS`."""
    part_raw_best_RS: torch.Tensor
    """float32: the largest logit of each part before processing; NaN counts as +inf."""
    part_sum_RS: torch.Tensor
    """float32: sum of exp((logit - the part's largest) / temperature)."""
    row_max_R: torch.Tensor
    row_sum_R: torch.Tensor
    """float32: sum of the weights."""
    num_arrived_R: torch.Tensor
    """int32: how many programs of the row are done; 0 between launches."""

    @property
    def num_chunks(self) -> int:
        return -(-self.vocab_size // self.chunk)

    @property
    def num_parts(self) -> int:
        return -(-self.num_chunks // self.chunks_per_part)


def allocate_workspace(
    num_rows: int,
    vocab_size: int,
    device: torch.device,
    chunk: int = CHUNK,
    chunks_per_part: int = CHUNKS_PER_PART,
) -> SamplingWorkspace:
    """Allocates about 4.5 KB for a row of 128,256 logits. Call it once, outside any CUDA graph."""
    num_chunks = triton.cdiv(vocab_size, chunk)
    num_parts = triton.cdiv(num_chunks, chunks_per_part)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return SamplingWorkspace(
        vocab_size=vocab_size,
        chunk=chunk,
        chunks_per_part=chunks_per_part,
        chunk_max_RC=floats(num_rows, num_chunks),
        active_chunks_RC=torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device),
        part_best_RS=floats(num_rows, num_parts),
        part_token_RS=torch.empty((num_rows, num_parts), dtype=torch.int32, device=device),
        part_raw_best_RS=floats(num_rows, num_parts),
        part_sum_RS=floats(num_rows, num_parts),
        row_max_R=floats(num_rows),
        row_sum_R=floats(num_rows),
        num_arrived_R=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


@triton.jit
def load_field(params_ptr, row, FIELD: tl.constexpr):  # type: ignore[no-untyped-def]
    """An integer parameter of the row."""
    return tl.load(params_ptr + row * _NUM_FIELDS + FIELD)


@triton.jit
def load_float_field(params_ptr, row, FIELD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A parameter of the row that is stored as a float's bits."""
    return tl.load(params_ptr + row * _NUM_FIELDS + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(  # type: ignore[no-untyped-def]
    logits_ptr, processed_ptr, row, processed_row, row_stride, tokens, vocab_size, HAS_PROCESSED: tl.constexpr
):
    """The row's logits as float32, processed logits if there are any. -inf past the vocabulary.

    NaN becomes +inf: it wins, as in torch's argmax, and comparisons need no special case.
    """
    mask = tokens < vocab_size
    if HAS_PROCESSED:
        if processed_row >= 0:
            processed_row_ptr = processed_ptr + processed_row.to(tl.int64) * vocab_size
            logits = tl.load(processed_row_ptr + tokens, mask, other=float("-inf"))
        else:
            row_ptr = logits_ptr + row.to(tl.int64) * row_stride
            logits = tl.load(row_ptr + tokens, mask, other=float("-inf")).to(tl.float32)
    else:
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        logits = tl.load(row_ptr + tokens, mask, other=float("-inf")).to(tl.float32)
    return tl.where(logits != logits, float("inf"), logits)


@triton.jit
def to_score(logits, row_max, temperature):  # type: ignore[no-untyped-def]
    """The scores of logits. Rounds divisions as IEEE 754 requires, as on the CPU. On a GPU, the plain operator is an
    approximation."""
    return tl.div_rn(logits - row_max, temperature)


@triton.jit
def to_weight_bits(scores):  # type: ignore[no-untyped-def]
    return tl.exp(scores).to(tl.int32, bitcast=True)


@triton.jit
def gumbel_noise(tokens, key_0, key_1):  # type: ignore[no-untyped-def]
    """engine.counter_rng.gumbel_noise of these tokens, bit for bit except the logarithms.

    A device may round the last bit of a logarithm differently. This changes about one draw in a million.
    """
    x = tokens.to(tl.uint32) ^ key_0.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x + key_1.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    u = ((x >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)  # 2^23
    return -tl.log(-tl.log(u))
