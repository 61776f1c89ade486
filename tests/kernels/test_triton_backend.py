"""The kernels that compute inputs of 8-bit products quantize them, and nothing else does."""

import pytest
import torch

from engine.kernels.skinny_linear import MAX_TOKENS
from engine.layers.backend import QuantizedRows
from engine.layers.fp8 import Fp8Weight
from engine.layers.triton_backend import TritonBackend
from tests.kernels.references import add_rms_norm_reference_, gate_mul_reference

WIDTH, OUTPUTS, EPS = 64, 32, 1e-5


def random(generator: torch.Generator, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.float16).to(device)


@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS, MAX_TOKENS + 1])
def test_many_tokens_are_quantized_by_the_kernel_before_the_product(
    num_tokens: int, device: torch.device, generator: torch.Generator
) -> None:
    backend = TritonBackend()
    weight_OI = random(generator, device, OUTPUTS, WIDTH)
    linear = backend.fp8_linear(weight_OI, None)
    x_TE, residual_TE = (random(generator, device, num_tokens, WIDTH) for _ in range(2))
    weight_E = random(generator, device, WIDTH)
    whole_TE, same_TE = residual_TE.clone(), residual_TE.clone()
    expected_TE = add_rms_norm_reference_(x_TE, whole_TE, weight_E, EPS)
    normed = backend.add_rms_norm(x_TE, same_TE, weight_E, EPS)
    assert isinstance(normed, QuantizedRows) == (num_tokens > MAX_TOKENS)
    torch.testing.assert_close(same_TE, whole_TE)
    off = linear(normed).float() - expected_TE.float() @ weight_OI.float().T
    assert off.norm() < 0.06 * (expected_TE.float() @ weight_OI.float().T).norm(), "more than 8 bits explain"

    gate_up_TM = random(generator, device, num_tokens, 2 * WIDTH)
    gated = backend.gate_mul(gate_up_TM)
    assert isinstance(gated, QuantizedRows) == (num_tokens > MAX_TOKENS)
    expected_TO = gate_mul_reference(gate_up_TM).float() @ weight_OI.float().T
    assert (linear(gated).float() - expected_TO).norm() < 0.06 * expected_TO.norm()


@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS + 1])
def test_a_checkpoints_8_bit_floats_quantize_their_own_inputs(
    num_tokens: int, device: torch.device, generator: torch.Generator
) -> None:
    """The same layer may also have linears that are not in 8 bits."""
    backend = TritonBackend()
    weight_OI = random(generator, device, OUTPUTS, WIDTH)
    weight = Fp8Weight.quantize(weight_OI)
    in_8_bits, in_16_bits = backend.linear(weight, None), backend.linear(weight_OI, None)
    x_TE, residual_TE = (random(generator, device, num_tokens, WIDTH) for _ in range(2))
    normed = backend.add_rms_norm(x_TE, residual_TE, random(generator, device, WIDTH), EPS)
    assert isinstance(normed, torch.Tensor)
    for linear, numbers_OI in ((in_8_bits, weight.dequantized()), (in_16_bits, weight_OI)):
        expected_TO = normed.float() @ numbers_OI.float().T
        assert (linear(normed).float() - expected_TO).norm() < 0.04 * expected_TO.norm()


def test_without_8_bit_products_nothing_is_quantized(
    device: torch.device, generator: torch.Generator
) -> None:
    backend = TritonBackend()
    backend.linear(random(generator, device, OUTPUTS, WIDTH), None)
    x_TE = random(generator, device, MAX_TOKENS + 1, WIDTH)
    weight_E = random(generator, device, WIDTH)
    assert isinstance(backend.add_rms_norm(x_TE, x_TE.clone(), weight_E, EPS), torch.Tensor)
    assert isinstance(backend.gate_mul(x_TE), torch.Tensor)
