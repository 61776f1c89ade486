"""Edits of a step's logits by bias, penalties and masks, as flat lists for the device. The results equal those of
engine/sampler.py.

Shape suffixes: P rows that are processed, E edits, F fields of an edit, G rows with a grammar, W words of a mask.
"""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.batch import SampledRequest
from engine.kernels.process_logits import NUM_EDIT_FIELDS
from engine.request_table import IntArray

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Arguments of `process_logits`, on the host."""

    rows_P: Int32Array
    mask_rows_P: Int32Array
    edits_EF: Int32Array
    masks_GW: Int32Array


def list_edits(requests: Sequence[SampledRequest], rows: Sequence[int], vocab_size: int) -> LogitEdits:
    """The edits of these rows of the step. All rows need processing.

    If penalties or a grammar apply to a request, its earlier tokens must be known.
    """
    num_words = -(-vocab_size // 32)
    mask_rows: list[int] = []
    masks: list[Int32Array] = []
    edits: list[Int32Array] = []
    for processed_row, row in enumerate(rows):
        edits.append(_edits(requests[row], processed_row, vocab_size))
        matcher = requests[row].matcher
        mask_rows.append(-1 if matcher is None else len(masks))
        if matcher is not None:
            masks.append(matcher.allowed_words(requests[row].drafts))
    return LogitEdits(
        rows_P=np.array(rows, dtype=np.int32),
        mask_rows_P=np.array(mask_rows, dtype=np.int32),
        edits_EF=np.concatenate(edits),
        masks_GW=np.array(masks, dtype=np.int32).reshape(len(masks), num_words),
    )


def _edits(request: SampledRequest, processed_row: int, vocab_size: int) -> Int32Array:
    """E x F, each token once. Token ids outside the vocabulary are ignored."""
    p = request.sampling_params
    bias = {token_id: value for token_id, value in p.logit_bias.items() if token_id < vocab_size}
    seen, outputs, counts = _NO_TOKENS, _NO_TOKENS, _NO_TOKENS
    if p.repetition_penalty != 1.0:
        seen = request.count_tokens().tokens
    if p.presence_penalty or p.frequency_penalty:
        counted = request.count_outputs()
        outputs, counts = counted.tokens, counted.counts
    forbidden = _NO_TOKENS
    if request.num_output_tokens < p.min_tokens:
        forbidden = np.array([t for t in request.stop_token_ids if t < vocab_size], dtype=np.int64)
    biased = np.array(list(bias), dtype=np.int64)
    tokens = _union(seen, outputs, biased, forbidden)
    edits_EF = np.zeros((len(tokens), NUM_EDIT_FIELDS), dtype=np.int32)
    floats_EF = edits_EF.view(np.float32)
    edits_EF[:, 0] = processed_row
    edits_EF[:, 1] = tokens
    floats_EF[np.searchsorted(tokens, biased), 2] = list(bias.values())
    floats_EF[:, 3] = 1.0
    floats_EF[np.searchsorted(tokens, seen), 3] = p.repetition_penalty
    # Computed in float32 step by step, as torch does.
    penalties = np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts.astype(np.float32)
    floats_EF[np.searchsorted(tokens, outputs), 4] = penalties
    edits_EF[np.searchsorted(tokens, forbidden), 5] = 1
    return edits_EF


def _union(seen: IntArray, outputs: IntArray, *others: IntArray) -> IntArray:
    """All tokens of these arrays, each once, in ascending order. The first two arrays are sorted already, and mostly
    contain all tokens."""
    largest = seen if len(seen) else outputs
    rest = np.concatenate([*others, outputs]) if len(seen) else np.concatenate(others)
    if len(largest) == 0:
        return np.unique(rest)
    places = np.minimum(np.searchsorted(largest, rest), len(largest) - 1)
    missing = rest[largest[places] != rest]
    return np.unique(np.concatenate([largest, missing])) if len(missing) else largest


_NO_TOKENS: IntArray = np.empty(0, dtype=np.int64)
