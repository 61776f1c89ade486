"""Collectives of one rank, and of ranks that do not find each other; those that do: tests/integration/test_ranks.py."""

from pathlib import Path

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


def test_a_rank_that_nobody_joins_says_so_in_time(tmp_path: Path) -> None:
    collectives = TorchCollectives(tmp_path, 0, 2, torch.device("cpu"), timeout_s=0.5)
    with pytest.raises(RuntimeError, match="connect failed on rank 0 of 2"):
        collectives.connect()
    collectives.close()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 1)])
def test_a_group_has_more_than_one_rank(tmp_path: Path, rank: int, size: int) -> None:
    with pytest.raises(AssertionError):
        TorchCollectives(tmp_path, rank, size, torch.device("cpu"), 1.0)
