"""Queries and keys are normed over the heads of all ranks."""

import pytest
import torch

from engine.collectives import SINGLE_RANK, Collectives
from engine.layers.projection_norm import ProjectionNorm
from tests.factories.threaded_ranks import on_ranks

EPS = 1e-3
Q, K = 24, 8


def reference(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.double().split((Q, K, K), -1)
    normed = [
        torch.nn.functional.rms_norm(part, part.shape[-1:], weight.double(), EPS)
        for part, weight in ((q, q_weight), (k, k_weight))
    ]
    return torch.cat([*normed, v], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rank(dtype: torch.dtype) -> None:
    qkv, q_weight, k_weight = (torch.randn(*shape).to(dtype) for shape in ((5, Q + 2 * K), (Q,), (K,)))
    expected = reference(qkv, q_weight, k_weight)
    ProjectionNorm(q_weight, k_weight, EPS, SINGLE_RANK).apply_(qkv)
    torch.testing.assert_close(qkv, expected.to(dtype))


def test_two_ranks_share_the_sums_of_squares() -> None:
    qkv, q_weight, k_weight = torch.randn(5, Q + 2 * K), torch.randn(Q), torch.randn(K)
    parts = qkv.split((Q, K, K), -1)

    def of_rank(whole: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([part.chunk(2, -1)[rank] for part in whole.split((Q, K, K), -1)], -1)

    def run(collectives: Collectives) -> torch.Tensor:
        rank = collectives.rank
        share = torch.cat([part.chunk(2, -1)[rank] for part in parts], -1)
        weights = q_weight.chunk(2)[rank], k_weight.chunk(2)[rank]
        ProjectionNorm(*weights, EPS, collectives).apply_(share)
        return share

    expected = reference(qkv, q_weight, k_weight).float()
    for rank, share in enumerate(on_ranks(2, run)):
        torch.testing.assert_close(share, of_rank(expected, rank))
