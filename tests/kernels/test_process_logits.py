"""Bias, penalties and masks against torch."""

import math

import pytest
import torch

from engine.kernels.process_logits import process_logits
from tests.kernels.references import process_logits_reference


def edit(
    row: int,
    token: int,
    bias: float = 0.0,
    repetition: float = 1.0,
    off: float = 0.0,
    is_forbidden: bool = False,
) -> torch.Tensor:
    floats = torch.tensor([bias, repetition, off]).view(torch.int32)
    ends = torch.tensor([row, token, int(is_forbidden)], dtype=torch.int32)
    return torch.cat([ends[:2], floats, ends[2:]])


def compile_launch(vocab_size: int) -> None:
    logits_RV = torch.empty(4, vocab_size, dtype=torch.bfloat16)
    rows_P = torch.zeros(2, dtype=torch.int32)
    masks_PW = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)
    edits_EF = torch.zeros(300, 6, dtype=torch.int32)
    process_logits(logits_RV, rows_P, masks_PW, rows_P, edits_EF, torch.empty(2, vocab_size))


LAUNCHES = {
    "Llama-3.1-8B": lambda: compile_launch(128_256),
    "Qwen2.5-7B": lambda: compile_launch(151_936),
}
RARE = ("Qwen2.5-7B",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_is_what_torch_computes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    vocab_size = 4_100  # two blocks, the second with an end
    logits_RV = (3 * torch.randn(5, vocab_size, generator=generator)).to(dtype).to(device)
    rows_P = torch.tensor([3, 0, 4], dtype=torch.int32, device=device)
    mask_rows_P = torch.tensor([-1, 1, 0], dtype=torch.int32, device=device)
    masks_PW = torch.randint(-(2**31), 2**31, (2, 129), generator=generator).to(torch.int32).to(device)
    tokens = torch.randperm(vocab_size, generator=generator)[:300].tolist()
    edits_EF = torch.stack(
        [
            edit(i % 3, t, bias=i / 7 - 20, repetition=0.5 + i / 99, off=i / 50 - 3)
            for i, t in enumerate(tokens)
        ]
        + [edit(0, 4_099 if 4_099 not in tokens else 0, bias=5.0, is_forbidden=True)]
    ).to(device)
    processed_PV = torch.full((3, vocab_size), math.nan, device=device)
    process_logits(logits_RV, rows_P, masks_PW, mask_rows_P, edits_EF, processed_PV)
    expected_PV = process_logits_reference(logits_RV, rows_P, masks_PW, mask_rows_P, edits_EF)
    assert torch.equal(processed_PV, expected_PV)
    assert (processed_PV[1:] == -math.inf).float().mean() > 0.4


def test_nothing_to_edit(device: torch.device, generator: torch.Generator) -> None:
    logits_RV = torch.randn(2, 70, generator=generator).to(device)
    rows_P = torch.tensor([1], dtype=torch.int32, device=device)
    no_mask_P = torch.tensor([-1], dtype=torch.int32, device=device)
    empty = torch.empty(0, 6, dtype=torch.int32, device=device)
    processed_PV = torch.full((1, 70), math.nan, device=device)
    process_logits(logits_RV, rows_P, empty[:, :3], no_mask_P, empty, processed_PV)
    assert torch.equal(processed_PV, logits_RV[1:])
