"""Partial results of a long context, merged by their weights."""

import torch

from engine.kernels.merge_partials import BLOCK_PARTS, merge_partials
from tests.kernels.references import merge_partials_reference

NUM_HEADS, HEAD_DIM = 3, 24


def test_is_the_average_by_weights_in_the_rows_that_are_named(
    device: torch.device, generator: torch.Generator
) -> None:
    """One result has one part, one has a few parts with a stride, and one has more parts than are read at
    once. One part saw no key at all."""
    num_rows = 3 * BLOCK_PARTS
    partial_PQD = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, generator=generator).to(device)
    weight_PQ = (8 * torch.randn(num_rows, NUM_HEADS, generator=generator)).to(device)
    weight_PQ[4] = float("-inf")
    merges_RF = torch.tensor([[2, 0, 1, 1], [0, 1, 3, 2], [5, 1, 2 * BLOCK_PARTS + 1, 1]], dtype=torch.int32)
    ignored_RF = torch.tensor([[3, 0, 1, 1]], dtype=torch.int32)
    expected_TQD = torch.full((6, NUM_HEADS, HEAD_DIM), 7.0, device=device)
    out_TQD = expected_TQD.clone()

    merge_partials_reference(partial_PQD, weight_PQ, merges_RF, expected_TQD)
    merges = torch.cat([merges_RF, ignored_RF]).to(device)
    num_merges = torch.tensor([len(merges_RF)], dtype=torch.int32, device=device)
    merge_partials(partial_PQD, weight_PQ, merges, num_merges, out_TQD, num_programs=2)

    torch.testing.assert_close(out_TQD, expected_TQD)
