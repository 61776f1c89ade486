"""Sampling: every filter, alone and together, against a sort; the distribution; degenerate rows."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from engine.counter_rng import row_keys
from engine.kernels.sample import sample
from engine.kernels.sampling_parts import NUM_FIELDS, allocate_workspace
from tests.kernels.references import sample_reference

VOCAB = 150


def params(num_rows: int, **columns: Any) -> torch.Tensor:
    """Packed parameters of rows: a value for all rows or one per row. The seed of row r is r."""
    rows = np.zeros((num_rows, NUM_FIELDS), dtype=np.int32)
    floats = rows.view(np.float32)
    floats[:, 0] = columns.pop("temperature", 1.0)
    rows[:, 1] = columns.pop("top_k", 2**30)
    floats[:, 2] = columns.pop("top_p", 1.0)
    floats[:, 3] = columns.pop("min_p", 0.0)
    rows[:, 4:6] = np.array([row_keys(row, 3) for row in range(num_rows)], dtype=np.uint32).view(np.int32)
    rows[:, 6] = columns.pop("processed_row", -1)
    assert not columns, f"no such parameters: {columns}"
    return torch.from_numpy(rows)


def sampled(
    logits_RV: torch.Tensor, params_RF: torch.Tensor, processed_PV: torch.Tensor | None = None
) -> list[int]:
    """Samples with chunks so small that even these short rows have many."""
    return sampled_and_flagged(logits_RV, params_RF, processed_PV)[0]


def sampled_and_flagged(
    logits_RV: torch.Tensor, params_RF: torch.Tensor, processed_PV: torch.Tensor | None = None
) -> tuple[list[int], list[int]]:
    """The tokens, and which rows are not finite."""
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    workspace = allocate_workspace(num_rows, vocab_size, device, chunk=32, chunks_per_part=4)
    tokens_R = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    is_greedy = not params_RF[:, 0].any()
    flags_R = torch.full_like(tokens_R, -1)
    sample(logits_RV, processed_PV, params_RF.to(device), tokens_R, flags_R, workspace, is_greedy)
    assert not workspace.num_arrived_R.any(), "the next launch would count on"
    return tokens_R.tolist(), flags_R.tolist()


def compile_launch(vocab_size: int, dtype: torch.dtype, has_processed: bool) -> None:
    logits_RV = torch.empty(2, vocab_size, dtype=dtype)
    processed_PV = torch.empty(1, vocab_size) if has_processed else None
    workspace = allocate_workspace(2, vocab_size, logits_RV.device)
    tokens_R, flags_R = torch.empty((2, 4), dtype=torch.int32)
    sample(logits_RV, processed_PV, params(2), tokens_R, flags_R, workspace, is_greedy=False)


LAUNCHES = {
    "Llama-3.1-8B": lambda: compile_launch(128_256, torch.bfloat16, False),
    "Llama-3.1-8B, processed rows": lambda: compile_launch(128_256, torch.bfloat16, True),
    "Qwen2.5-7B": lambda: compile_launch(151_936, torch.bfloat16, False),
    "float32": lambda: compile_launch(128_256, torch.float32, False),
}
RARE = ("Llama-3.1-8B", "Qwen2.5-7B", "float32")
"""The first is compiled for sm_80. Processed rows are in float32, too."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (2, 17), (3, VOCAB), (1, 300)])
def test_greedy_rows_take_the_arg_max_lowest_on_ties(
    dtype: torch.dtype, num_rows: int, vocab_size: int, device: torch.device, generator: torch.Generator
) -> None:
    logits_RV = torch.randint(-4, 5, (num_rows, vocab_size), generator=generator).to(dtype).to(device)
    assert sampled(logits_RV, params(num_rows, temperature=0.0)) == logits_RV.cpu().argmax(-1).tolist()


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 60},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"top_k": 149, "top_p": 0.3, "temperature": 3.0},
        {"temperature": 0.3},
        {"temperature": 1e-30, "top_p": 0.9},
        {"temperature": 100.0, "top_p": 0.6, "top_k": 100},
    ],
)
def test_a_draw_is_the_arg_max_over_what_a_sort_keeps(
    filters: dict[str, Any], device: torch.device, generator: torch.Generator
) -> None:
    logits_RV = 2.0 * torch.randn(2, VOCAB, generator=generator)
    rows_RF = params(2, **filters)
    assert sampled(logits_RV.to(device), rows_RF) == sample_reference(logits_RV, rows_RF).tolist()


def test_rows_draw_by_their_own_parameters(device: torch.device, generator: torch.Generator) -> None:
    """Greedy, plain and filtered rows in one launch, from rows within a wider matrix."""
    temperature = np.array([0.0, 1.0, 0.7, 2.0, 0.0, 1.5, 0.4, 1.0])
    rows_RF = params(
        8,
        temperature=temperature,
        top_k=np.array([3, 200, 200, 9, 200, 30, 200, 1]),
        top_p=np.array([0.1, 1.0, 0.8, 1.0, 1.0, 0.5, 0.99, 1.0]),
        min_p=np.array([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.3, 0.0]),
    )
    wide_RX = torch.randn(8, VOCAB + 30, generator=generator)
    logits_RV = wide_RX[:, :VOCAB]
    assert sampled(wide_RX.to(device)[:, :VOCAB], rows_RF) == sample_reference(logits_RV, rows_RF).tolist()


def test_draws_follow_the_distribution(device: torch.device, generator: torch.Generator) -> None:
    logits_1V = torch.randn(1, 12, generator=generator)
    count = 60
    expected = count * logits_1V[0].softmax(-1)
    seen = Counter(sampled(logits_1V.to(device).expand(count, -1), params(count)))
    assert (
        sum((seen[i] - e) ** 2 / e for i, e in enumerate(expected.tolist())) < 31.3
    )  # 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.5}]
)
def test_tokens_as_likely_as_the_last_survivor_survive_with_it(
    filters: dict[str, Any], device: torch.device
) -> None:
    rows_RF = params(6, **filters)
    logits_RV = torch.zeros(6, VOCAB)
    tokens = sampled(logits_RV.to(device), rows_RF)
    assert tokens == sampled(logits_RV.to(device), params(6))
    assert len(set(tokens)) > 3


def test_impossible_tokens_are_not_drawn(device: torch.device, generator: torch.Generator) -> None:
    logits_RV = torch.full((6, VOCAB), -math.inf)
    logits_RV[:, [3, 77, 149]] = torch.randn(6, 3, generator=generator)
    rows_RF = params(
        6, top_p=np.array([1.0, 0.9, 1.0, 0.9, 1.0, 1.0]), top_k=np.array([150, 150, 20, 20, 2, 1])
    )
    tokens = sampled(logits_RV.to(device), rows_RF)
    assert tokens == sample_reference(logits_RV, rows_RF).tolist()
    assert set(tokens) <= {3, 77, 149}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_give_their_arg_max(temperature: float, device: torch.device) -> None:
    logits_RV = torch.zeros(5, VOCAB)
    logits_RV[0] = -math.inf
    logits_RV[1, 40] = math.nan
    logits_RV[2, [60, 61]] = math.inf
    logits_RV[3] = math.nan
    logits_RV[4] = torch.arange(VOCAB)
    rows_RF = params(5, temperature=temperature, top_k=7, top_p=0.9, min_p=0.1)
    tokens, flags = sampled_and_flagged(logits_RV.to(device), rows_RF)
    assert tokens[:4] == [0, 40, 60, 0]
    assert tokens[4] >= VOCAB - 7
    assert flags == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("place", [0, 33, VOCAB - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c55_a_row_is_finite_by_its_logits_before_processing(
    temperature: float, place: int, device: torch.device
) -> None:
    """Processing hides a NaN in row 0, leaves nothing in row 1, and gives row 2 an infinite value."""
    logits_RV = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits_RV[3, :] = -math.inf
    logits_RV[3, place] = 1.0
    processed_PV = logits_RV[:3].to(torch.float32)
    logits_RV[0, place] = math.nan
    processed_PV[1] = -math.inf
    processed_PV[2, place] = math.inf
    rows_RF = params(5, processed_row=np.array([0, 1, 2, -1, -1]), temperature=temperature, top_k=5)
    _, flags = sampled_and_flagged(logits_RV.to(device), rows_RF, processed_PV.to(device))
    assert flags == [1, 0, 0, 0, 0]


def test_processed_rows_take_the_place_of_theirs(device: torch.device, generator: torch.Generator) -> None:
    logits_RV = torch.randn(4, VOCAB, generator=generator).to(torch.bfloat16)
    processed_PV = 3.0 * torch.randn(2, VOCAB, generator=generator)
    rows_RF = params(4, processed_row=np.array([-1, 1, -1, 0]), temperature=np.array([1, 1, 0, 0]), top_p=0.8)
    effective_RV = logits_RV.to(torch.float32)
    effective_RV[1], effective_RV[3] = processed_PV[1], processed_PV[0]
    tokens = sampled(logits_RV.to(device), rows_RF, processed_PV.to(device))
    assert tokens == sample_reference(effective_RV, rows_RF).tolist()
