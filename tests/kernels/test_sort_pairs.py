"""Pairs sorted by expert, and each token's sum.

Shape suffixes: T tokens, K experts of a token, N pairs, X experts, E hidden size.
"""

import pytest
import torch

from engine.kernels.sort_pairs import ExpertPairs
from engine.kernels.sum_pairs import sum_pairs

LAUNCHES = {
    "sort 64 tokens": lambda: ExpertPairs.of(torch.empty(64, 8, dtype=torch.int32, device="meta"), 128, 128),
    "sum, added": lambda: sum_pairs(
        torch.empty(8, 2048, dtype=torch.bfloat16, device="meta"),
        ExpertPairs.of(torch.empty(1, 8, dtype=torch.int32, device="meta"), 128, 128),
        torch.empty(1, 2048, dtype=torch.bfloat16, device="meta"),
    ),
    "sum": lambda: sum_pairs(
        torch.empty(8, 2048, dtype=torch.bfloat16, device="meta"),
        ExpertPairs.of(torch.empty(1, 8, dtype=torch.int32, device="meta"), 128, 128),
    ),
}


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(17, 2, 3), (40, 3, 130), (683, 3, 5), (1500, 3, 9)]
)
def test_pairs_of_each_expert_are_in_order(
    num_tokens: int, num_chosen: int, num_experts: int, device: torch.device, generator: torch.Generator
) -> None:
    """One to three blocks of pairs. The last number stands for experts of other ranks, and some experts have no
    pair."""
    shape = (num_tokens, num_chosen)
    experts_TK = torch.randint(0, num_experts + 1, shape, dtype=torch.int32, generator=generator).to(device)
    experts_TK[experts_TK == 1] = 2
    pairs = ExpertPairs.of(experts_TK, num_experts, num_experts)
    experts_N = experts_TK.flatten().long()
    assert pairs.order_N is not None
    assert pairs.counts_X is not None
    assert pairs.order_N.dtype is pairs.counts_X.dtype is torch.int32
    counts_X = torch.bincount(experts_N, minlength=num_experts + 1)[:num_experts]
    assert torch.equal(pairs.counts_X.long(), counts_X)
    num_own_experts = int(counts_X.sum())
    assert 0 < num_own_experts < len(experts_N)
    assert torch.equal(
        pairs.order_N[:num_own_experts].long(), experts_N.argsort(stable=True)[:num_own_experts]
    )


def test_pairs_of_few_tokens_are_not_sorted(device: torch.device) -> None:
    pairs = ExpertPairs.of(torch.zeros(16, 1, dtype=torch.int32, device=device), 3, 3)
    assert pairs.order_N is None
    assert pairs.counts_X is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_chosen", "width"), [(1, 8, 40), (3, 3, 1025), (20, 1, 64)])
def test_sums_are_in_float32_without_rows_of_other_ranks(
    num_tokens: int,
    num_chosen: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    experts_TK = torch.randint(0, 4, (num_tokens, num_chosen), dtype=torch.int32, generator=generator).to(
        device
    )
    y_NE = torch.randn(num_tokens * num_chosen, width, generator=generator).to(dtype).to(device)
    is_other_N1 = (experts_TK.flatten() == 3).unsqueeze(1)
    expected_NE = y_NE.float().masked_fill(is_other_N1, 0.0)
    y_NE, pairs = y_NE.masked_fill(is_other_N1, torch.nan), ExpertPairs(experts_TK, 3, 4, None, None)
    found_TE = sum_pairs(y_NE, pairs)
    expected_TE = expected_NE.unflatten(0, (num_tokens, num_chosen)).sum(1).to(dtype)
    torch.testing.assert_close(found_TE, expected_TE)
    residual_TE = torch.randn(num_tokens, width, generator=generator).to(dtype).to(device)
    expected_sum_TE = residual_TE + found_TE
    assert sum_pairs(y_NE, pairs, residual_TE) is residual_TE
    torch.testing.assert_close(residual_TE, expected_sum_TE)
