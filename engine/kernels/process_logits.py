"""Applies bias, penalties and masks to the logits of rows that have any, before temperature and filters.

The host lists the edits, each (row, token) once. An edit applies its fields in the order that SamplingParams promises.
Masks of grammars have one bit per token. All other logits are copied as float32.

Shape suffixes: P rows that are processed, V vocabulary, E edits, W 32-bit words of a mask.
"""

import torch
import triton
import triton.language as tl

BLOCK_V = 4096
BLOCK_E = 256

NUM_EDIT_FIELDS = 6
"""int32 words of an edit: processed row, token, bias, repetition penalty (1: none), the sum of presence and frequency
penalties, and whether the token is forbidden. The fields from bias to the sum are floats, stored as their bits."""
_NUM_EDIT_FIELDS = tl.constexpr(NUM_EDIT_FIELDS)


def process_logits(
    logits_RV: torch.Tensor,
    rows_P: torch.Tensor,
    masks_PW: torch.Tensor,
    mask_rows_P: torch.Tensor,
    edits_EF: torch.Tensor,
    processed_PV: torch.Tensor,
) -> None:
    """Writes `processed_PV` (float32, contiguous): row p is row `rows_P[p]` of the logits, edited.

    `mask_rows_P[p]` is p's row of `masks_PW`, or -1. Bit b of word w there allows token 32 w + b. All indices are
    int32. Two edits of one (row, token) would race. The lists may be empty; then nothing is launched for them.
    """
    num_rows, vocab_size = processed_PV.shape
    assert logits_RV.stride(1) == 1, "a row is one span"
    assert processed_PV.is_contiguous(), "processed rows are packed"
    assert masks_PW.shape[1] * 32 >= vocab_size, f"{masks_PW.shape[1]} words for {vocab_size} tokens"
    _mask_kernel[(triton.cdiv(vocab_size, BLOCK_V), num_rows)](
        logits_RV,
        rows_P,
        masks_PW,
        mask_rows_P,
        processed_PV,
        logits_RV.stride(0),
        masks_PW.stride(0),
        vocab_size,
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )
    num_edits = edits_EF.shape[0]
    if num_edits:
        _edit_kernel[(triton.cdiv(num_edits, BLOCK_E),)](
            edits_EF,
            processed_PV,
            num_edits,
            vocab_size,
            BLOCK_E=BLOCK_E,
            num_warps=4,
            enable_fp_fusion=False,  # a product, then a difference, each rounded: as torch computes them
        )


@triton.jit
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    rows_ptr,
    masks_ptr,
    mask_rows_ptr,
    processed_ptr,
    row_stride,
    mask_stride,
    vocab_size,
    BLOCK_V: tl.constexpr,
):
    processed_row = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + processed_row).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + processed_row).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = tokens < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask, other=0.0).to(tl.float32)
    if mask_row >= 0:
        words = tl.load(masks_ptr + mask_row * mask_stride + tokens // 32, mask, other=0)
        logits = tl.where(((words >> (tokens % 32)) & 1) != 0, logits, float("-inf"))
    tl.store(processed_ptr + processed_row * vocab_size + tokens, logits, mask)


@triton.jit(do_not_specialize=["num_edits"])  # it changes every step
def _edit_kernel(edits_ptr, processed_ptr, num_edits, vocab_size, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    edits = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = edits < num_edits
    fields_ptr = edits_ptr + edits * _NUM_EDIT_FIELDS
    row = tl.load(fields_ptr, mask, other=0).to(tl.int64)
    token = tl.load(fields_ptr + 1, mask, other=0)
    bias = tl.load(fields_ptr + 2, mask, other=0).to(tl.float32, bitcast=True)
    repetition = tl.load(fields_ptr + 3, mask, other=0x3F800000).to(tl.float32, bitcast=True)  # 1.0
    penalties = tl.load(fields_ptr + 4, mask, other=0).to(tl.float32, bitcast=True)
    is_forbidden = tl.load(fields_ptr + 5, mask, other=0) != 0
    value_ptr = processed_ptr + row * vocab_size + token
    value = tl.load(value_ptr, mask, other=0.0) + bias
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition) - penalties
    tl.store(value_ptr, tl.where(is_forbidden, float("-inf"), value), mask)
