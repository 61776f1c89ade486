"""Collectives of one rank, and of ranks that cannot connect; connected ones: tests/integration/test_ranks.py."""

import subprocess
import sys

import pytest
import torch

from engine.collectives import SilentRank, SingleRank, TorchCollectives


def test_a_single_rank_has_everything_already() -> None:
    alone = SingleRank()
    x_TE = torch.randn(2, 3)
    before_TE = x_TE.clone()
    alone.all_reduce_(x_TE)
    alone.broadcast_(x_TE)
    assert torch.equal(x_TE, before_TE)
    assert alone.all_gather(x_TE) is x_TE
    assert (alone.rank, alone.size) == (0, 1)


def test_a_silent_rank_gives_the_shapes_that_several_would() -> None:
    rank = SilentRank(1, 3)
    x_TE = torch.randn(2, 5)
    rank.all_reduce_(x_TE)
    rank.broadcast_(x_TE)
    assert rank.all_gather(x_TE).shape == (2, 15)
    assert (rank.rank, rank.size) == (1, 3)


LONELY = """
import os, torch
from engine.collectives import TorchCollectives
collectives = TorchCollectives(os.memfd_create("meeting"), 0, 2, torch.device("cpu"), timeout_s=0.5)
try:
    collectives.connect()
except RuntimeError as error:
    print(error)
collectives.close()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_rank_without_peers_fails_in_time() -> None:
    """The rank has a process of its own: torch counts its attempts, and ranks that meet must have made equally many."""
    command = [sys.executable, "-m", "tests.factories.code", LONELY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "connect failed on rank 0 of 2" in done.stdout


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 1)])
def test_a_group_has_more_than_one_rank(rank: int, size: int) -> None:
    with pytest.raises(AssertionError):
        TorchCollectives(-1, rank, size, torch.device("cpu"), 1.0)
