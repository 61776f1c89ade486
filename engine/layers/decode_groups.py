"""Groups a step's decodes by context length; each group has one padded table; knows no cache and no layer.

Shape suffixes: B requests of a group, M blocks of a padded table.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.batch import StepBatch

MIN_GROUP_BLOCKS = 8
"""Decodes with at most this many blocks share one group, since padding costs less than another kernel
call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The B rows of the step from `start` on, with one token each."""

    start: int
    block_ids_BM: torch.Tensor
    """The blocks of each context, padded with the null block."""
    context_lens_B: torch.Tensor
    """How many tokens each row attends to, including its own."""


def decode_groups(batch: StepBatch, device: torch.device) -> Iterator[DecodeGroup]:
    """Yields groups in the batch's order, with the longest contexts first.

    A group ends before the first context with at most half as many blocks as its longest. So at most about
    half of a table is padding."""
    num_blocks = batch.num_blocks_B.tolist()
    start = 0
    while start < batch.num_decodes:
        most = max(num_blocks[start : batch.num_decodes])  # drafts follow their request, but are longer
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
