"""Collectives of one rank, and of ranks that do not find each other; those that do: tests/integration/test_ranks.py."""

import os

import pytest
import torch

from engine.collectives import SingleRank, TorchCollectives


def test_a_single_rank_has_everything_already() -> None:
    alone = SingleRank()
    x_TE = torch.randn(2, 3)
    before_TE = x_TE.clone()
    alone.all_reduce_(x_TE)
    alone.broadcast_(x_TE)
    assert torch.equal(x_TE, before_TE)
    assert alone.all_gather(x_TE, dim=1) is x_TE
    assert (alone.rank, alone.size) == (0, 1)


def test_a_rank_that_nobody_joins_says_so_in_time() -> None:
    collectives = TorchCollectives(os.memfd_create("meeting"), 0, 2, torch.device("cpu"), timeout_s=0.5)
    with pytest.raises(RuntimeError, match="connect failed on rank 0 of 2"):
        collectives.connect()
    collectives.close()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 1)])
def test_a_group_has_more_than_one_rank(rank: int, size: int) -> None:
    with pytest.raises(AssertionError):
        TorchCollectives(-1, rank, size, torch.device("cpu"), 1.0)
