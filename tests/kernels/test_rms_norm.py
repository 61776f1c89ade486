"""RMSNorm, alone, after an addition, before a quantization."""

import pytest
import torch

from engine.kernels.rms_norm import add_rms_norm_, add_rms_norm_fp8_, rms_norm
from tests.kernels.float8 import assert_same_float8
from tests.kernels.references import add_rms_norm_reference_, rms_norm_fp8_reference, rms_norm_reference

EPS = 1e-2


def rows(width: int, num_tokens: int = 2) -> torch.Tensor:
    return torch.empty(num_tokens, width, dtype=torch.bfloat16)


LAUNCHES = {
    "Llama-3.1-8B": lambda: rms_norm(rows(4096), rows(4096)[0], 1e-5),
    "Llama-3.1-8B, add": lambda: add_rms_norm_(rows(4096), rows(4096), rows(4096)[0], 1e-5),
    "Llama-3.1-8B, add, float8": lambda: add_rms_norm_fp8_(rows(4096), rows(4096), rows(4096)[0], 1e-5),
    "width 5120, add": lambda: add_rms_norm_(rows(5120), rows(5120), rows(5120)[0], 1e-5),
    "width 16384, add": lambda: add_rms_norm_(rows(16384), rows(16384), rows(16384)[0], 1e-5),
}
RARE = ("width 5120, add",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 2), (3, 96), (2, 1030)])
def test_is_what_torch_computes(
    dtype: torch.dtype, num_tokens: int, width: int, device: torch.device, generator: torch.Generator
) -> None:
    x_TE, residual_TE, weight_E = random_inputs(generator, num_tokens, width, dtype, device)
    torch.testing.assert_close(rms_norm(x_TE, weight_E, EPS), rms_norm_reference(x_TE, weight_E, EPS))
    expected_residual_TE = residual_TE.clone()
    normed_TE = add_rms_norm_(x_TE, residual_TE, weight_E, EPS)
    expected_TE = add_rms_norm_reference_(x_TE, expected_residual_TE, weight_E, EPS)
    torch.testing.assert_close(residual_TE, expected_residual_TE)
    torch.testing.assert_close(normed_TE, expected_TE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizes_in_the_same_pass(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x_TE, residual_TE, weight_E = random_inputs(generator, 3, 300, dtype, device)
    expected_residual_TE = residual_TE.clone()
    add_rms_norm_reference_(x_TE, expected_residual_TE, weight_E, EPS)
    q_TE, scales_T1 = add_rms_norm_fp8_(x_TE, residual_TE, weight_E, EPS)
    torch.testing.assert_close(residual_TE, expected_residual_TE)
    expected_TE, expected_scales_T1 = rms_norm_fp8_reference(residual_TE, weight_E, EPS)
    torch.testing.assert_close(scales_T1, expected_scales_T1)
    assert_same_float8(q_TE, expected_TE, max_share=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_may_be_float32(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x_TE, _, weight_E = random_inputs(generator, 3, 96, dtype, device)
    weight_E = weight_E.to(torch.float32) / 3 + 1.0
    torch.testing.assert_close(rms_norm(x_TE, weight_E, EPS), rms_norm_reference(x_TE, weight_E, EPS))


def test_is_torchs_own_norm(device: torch.device, generator: torch.Generator) -> None:
    x_TE, _, weight_E = random_inputs(generator, 2, 64, torch.float32, device)
    torch.testing.assert_close(
        rms_norm(x_TE, weight_E, EPS), torch.nn.functional.rms_norm(x_TE, (64,), weight_E, EPS)
    )


def test_rows_may_lie_within_longer_ones(device: torch.device, generator: torch.Generator) -> None:
    wide_TX = torch.randn(4, 50, generator=generator).to(device)
    before_TX = wide_TX.clone()
    x_TE, residual_TE, weight_E = wide_TX[:, :16], wide_TX[:, 20:36], wide_TX[0, 34:50].clone()
    normed_TE = add_rms_norm_(x_TE, residual_TE, weight_E, EPS)
    torch.testing.assert_close(
        normed_TE, rms_norm_reference(before_TX[:, :16] + before_TX[:, 20:36], weight_E, EPS)
    )
    changed_X = (wide_TX != before_TX).any(0)
    assert changed_X.nonzero().flatten().tolist() == list(range(20, 36))


def test_no_rows_are_no_launch(device: torch.device) -> None:
    assert rms_norm(torch.empty(0, 8, device=device), torch.empty(8, device=device), EPS).shape == (0, 8)


def random_inputs(
    generator: torch.Generator, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator)).to(dtype).to(device)

    return random(num_tokens, width), random(num_tokens, width), random(width)
