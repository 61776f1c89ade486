"""Groups a step's decodes by context length, with one padded table each; knows no cache and no layer.

Shape suffixes: B requests of a group, M blocks of a padded table.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.batch import StepBatch

MIN_GROUP_BLOCKS = 8
"""Decodes of up to this many blocks share a group: padding costs less than another kernel call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `start` to `start + B` of the step: one token each."""

    start: int
    block_ids_BM: torch.Tensor
    """Padded with the null block."""
    context_lens_B: torch.Tensor
    """Tokens to attend to, the step's own included."""


def decode_groups(batch: StepBatch, device: torch.device) -> Iterator[DecodeGroup]:
    """Longest first, in the batch's order. A group ends at the first context of half its longest, so that about half of
    a table is padding at most."""
    num_blocks = batch.num_blocks_B.tolist()
    start = 0
    while start < batch.num_decodes:
        most = max(num_blocks[start : batch.num_decodes])  # a request's drafts, behind it, are longer
        limit = 0 if most <= MIN_GROUP_BLOCKS else most // 2
        end = start + 1
        while end < batch.num_decodes and num_blocks[end] > limit:
            end += 1
        yield DecodeGroup(
            start,
            torch.from_numpy(batch.block_ids_BM[start:end, :most]).to(device),
            torch.from_numpy(batch.context_lens_B[start:end]).to(device),
        )
        start = end
