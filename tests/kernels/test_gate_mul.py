"""silu(gate) * up, alone and before a quantization."""

import pytest
import torch

from engine.activation import Activation, ClampedSwiglu, Gate
from engine.kernels.gate_mul import gate_mul, gate_mul_fp8
from tests.kernels.float8 import assert_same_float8
from tests.kernels.references import gate_mul_fp8_reference, gate_mul_reference

LAUNCHES = {
    "Llama-3.1-8B": lambda: gate_mul(torch.empty(1, 2 * 14336, dtype=torch.bfloat16)),
    "float32": lambda: gate_mul(torch.empty(1, 2 * 96)),
    "Gemma-3-4B": lambda: gate_mul(torch.empty(1, 2 * 10240, dtype=torch.bfloat16), Gate.GELU_TANH),
    "gpt-oss-20b": lambda: gate_mul(
        torch.empty(1, 2 * 2880, dtype=torch.bfloat16), ClampedSwiglu(alpha=1.702, limit=7.0)
    ),
    "Llama-3.1-8B, float8": lambda: gate_mul_fp8(torch.empty(2, 2 * 14336, dtype=torch.bfloat16)),
    "Qwen3-8B, float8": lambda: gate_mul_fp8(torch.empty(2, 2 * 12288, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 2), (3, 192), (2, 2 * 1025)])
@pytest.mark.parametrize(
    "activation", [Gate.SILU, Gate.GELU_TANH, ClampedSwiglu(alpha=1.702, limit=3.0)], ids=str
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_is_what_torch_computes(
    dtype: torch.dtype,
    num_tokens: int,
    width: int,
    activation: Activation,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    gate_up_TM = (4 * torch.randn(num_tokens, width, generator=generator)).to(dtype).to(device)
    expected_TI = gate_mul_reference(gate_up_TM, activation)
    torch.testing.assert_close(gate_mul(gate_up_TM, activation), expected_TI)
    q_TI, scales_T1 = gate_mul_fp8(gate_up_TM, activation)
    expected_q_TI, expected_scales_T1 = gate_mul_fp8_reference(gate_up_TM, activation)
    torch.testing.assert_close(scales_T1, expected_scales_T1)
    assert_same_float8(q_TI, expected_q_TI, max_share=0.01)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_gelu_of_large_numbers_is_finite(device: torch.device) -> None:
    gates = torch.tensor([[-1e20, -200.0, 200.0, 1e20]], device=device)
    found = gate_mul(torch.cat([gates, torch.ones_like(gates)], 1), Gate.GELU_TANH)
    torch.testing.assert_close(found, gates.clamp(min=0.0))


def test_rows_may_lie_within_longer_ones(device: torch.device, generator: torch.Generator) -> None:
    gate_up_TM = torch.randn(4, 50, generator=generator).to(device)[:, 10:30]
    torch.testing.assert_close(gate_mul(gate_up_TM), gate_mul_reference(gate_up_TM))
    q_TI, _ = gate_mul_fp8(gate_up_TM)
    assert_same_float8(q_TI, gate_mul_fp8_reference(gate_up_TM)[0], max_share=0.02)


def test_no_rows_are_no_launch(device: torch.device) -> None:
    assert gate_mul_fp8(torch.empty(0, 8, device=device))[0].shape == (0, 4)
