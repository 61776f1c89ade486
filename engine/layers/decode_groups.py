"""Decodes of a step in groups of similar context length, each one padded table; knows no cache and no layer.

Shape suffixes: B requests of a group, M blocks of a padded table.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import BatchedRequest
from engine.kv_cache import NULL_BLOCK

MIN_GROUP_BLOCKS = 8
"""Decodes of up to this many blocks share a group: padding costs less there than another kernel call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `start` to `start + B` of the step: one token each."""

    start: int
    block_ids_BM: torch.Tensor
    """int64, padded with the null block."""
    context_lens_B: torch.Tensor
    """Tokens to attend to, the step's own included."""


def decode_groups(decodes: Sequence[BatchedRequest], device: torch.device) -> Iterator[DecodeGroup]:
    """Longest first, as they come; a group ends at the first context of half its longest one, so that at most half is
    padding."""
    start = 0
    while start < len(decodes):
        most = len(decodes[start].block_ids)
        limit = 0 if most <= MIN_GROUP_BLOCKS else most // 2
        end = start + 1
        while end < len(decodes) and len(decodes[end].block_ids) > limit:
            end += 1
        table_BM = np.full((end - start, most), NULL_BLOCK, dtype=np.int64)
        for row, decode in zip(table_BM, decodes[start:end], strict=True):
            row[: len(decode.block_ids)] = decode.block_ids
        lengths_B = np.array([decode.context_len for decode in decodes[start:end]], dtype=np.int64)
        yield DecodeGroup(
            start, torch.from_numpy(table_BM).to(device), torch.from_numpy(lengths_B).to(device)
        )
        start = end
