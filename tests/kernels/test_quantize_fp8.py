"""Rows to float8 with a scale each."""

import pytest
import torch

from engine.kernels.quantize_fp8 import quantize_fp8
from engine.layers.fp8 import quantize_rows
from tests.kernels.float8 import assert_same_float8

LAUNCHES = {
    "Llama-3.1-8B, float8, attention's output": lambda: quantize_fp8(
        torch.empty(2, 4096, dtype=torch.bfloat16)
    ),
    "Llama-3.1-8B, float8, down projection": lambda: quantize_fp8(
        torch.empty(2, 14336, dtype=torch.bfloat16)
    ),
    "Qwen3-8B, float8, down projection": lambda: quantize_fp8(torch.empty(2, 12288, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 300), (2, 1024)])
def test_is_what_torch_computes(
    dtype: torch.dtype, num_tokens: int, width: int, device: torch.device, generator: torch.Generator
) -> None:
    x_TE = (
        torch.randn(num_tokens, width, generator=generator)
        * torch.tensor([[1e-3], [1.0], [50.0]])[:num_tokens]
    )
    x_TE = x_TE.to(dtype).to(device)
    q_TE, scales_T1 = quantize_fp8(x_TE)
    expected_TE, expected_scales_T1 = quantize_rows(x_TE)
    torch.testing.assert_close(scales_T1, expected_scales_T1, rtol=0, atol=0)
    assert_same_float8(q_TE, expected_TE)


def test_a_row_of_zeros_stays_zeros(device: torch.device) -> None:
    x_TE = torch.zeros(1, 8, device=device)
    for q_TE, scales_T1 in (quantize_fp8(x_TE), quantize_rows(x_TE)):
        assert (q_TE.to(torch.float32) == 0).all()
        assert 0 < scales_T1.item() < 1e-10


def test_the_largest_magnitude_becomes_448(device: torch.device) -> None:
    q_TE, _ = quantize_fp8(torch.tensor([[0.1, -0.3, 0.2], [5e4, 1e4, 0.0]], device=device))
    assert q_TE.to(torch.float32).abs().amax(1).tolist() == [448, 448]


def test_rows_may_lie_within_longer_ones(device: torch.device, generator: torch.Generator) -> None:
    x_TE = torch.randn(3, 50, generator=generator).to(device)[:, 10:30]
    assert_same_float8(quantize_fp8(x_TE)[0], quantize_rows(x_TE)[0])


def test_no_rows_are_no_launch(device: torch.device) -> None:
    q_TE, scales_T1 = quantize_fp8(torch.empty(0, 8, device=device))
    assert q_TE.shape == (0, 8)
    assert scales_T1.shape == (0, 1)


def test_refuses_rows_too_wide_for_one_program(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="16385"):
        quantize_fp8(torch.empty(1, 16385, device=device))
