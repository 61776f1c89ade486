"""Matrix products with few rows."""

import re
from functools import partial

import pytest
import torch

from engine.kernels.gate_mul import gate_mul
from engine.kernels.rms_norm import add_rms_norm_, rms_norm
from engine.kernels.skinny_epilogue import InputNorm
from engine.kernels.skinny_linear import (
    MAX_FMA_TOKENS,
    choose_launch,
    norms_input,
    skinny_add_,
    skinny_gate_mul,
    skinny_linear,
)
from engine.kernels.skinny_linear_dot import DotLaunch
from engine.kernels.skinny_linear_fma import FmaLaunch
from tests.kernels.references import skinny_linear_reference

Shape = tuple[int, int, int]

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


def empty_launch(
    num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, fused: str = ""
) -> None:
    """`dtype`: the dtype of the weights. `fused`: the operation that the product is fused with in a decoder layer."""
    weight_OI = torch.empty(num_outputs, num_inputs, dtype=dtype, device="meta")
    scales_O = torch.empty(num_outputs, device="meta") if dtype is FP8 else None
    x_TI = torch.empty(num_tokens, num_inputs, dtype=F32 if dtype is F32 else BF16, device="meta")
    has_norm = "norm" in fused and norms_input(num_tokens, num_inputs, dtype.itemsize)
    norm = InputNorm(torch.empty(num_inputs, dtype=BF16, device="meta"), 1e-5) if has_norm else None
    if "silu" in fused:
        skinny_gate_mul(x_TI, weight_OI, None, scales_O, norm=norm)
    elif "add" in fused:
        y_TO = torch.empty(num_tokens, num_outputs, dtype=BF16, device="meta")
        skinny_add_(y_TO, x_TI, weight_OI, None, scales_O)
    else:
        skinny_linear(x_TI, weight_OI, None, scales_O, norm=norm)


PRODUCTS: dict[str, tuple[int, int, str]] = {
    "Llama-3.1-8B qkv": (6144, 4096, ""),
    "Llama-3.1-8B o": (4096, 4096, ""),
    "Llama-3.1-8B down": (4096, 14336, ""),
    "Llama-3.1-8B gate_up": (28672, 4096, ""),
    "Llama-3.1-8B tp8 o": (4096, 512, ""),
    "Qwen3-8B down": (4096, 12288, ""),
    "fused Llama-3.1-8B qkv": (6144, 4096, "norm"),
    "fused Llama-3.1-8B o": (4096, 4096, "add"),
    "fused Llama-3.1-8B gate_up": (28672, 4096, "norm and silu"),
    "fused Llama-3.1-8B down": (4096, 14336, "add"),
    "fused Llama-3.1-70B tp4 gate_up": (14336, 8192, "norm and silu"),
    "fused Qwen3-14B gate_up": (34816, 5120, "norm and silu"),
}
LAUNCHES = {
    f"{name}, {num_tokens}{', float8' if dtype is FP8 else ''}": partial(
        empty_launch, num_tokens, num_outputs, num_inputs, dtype, fused
    )
    for name, (num_outputs, num_inputs, fused) in PRODUCTS.items()
    for dtype in (BF16, FP8)
    for num_tokens in (1, 2, 4, 16)
} | {f"float32, {num_tokens}": partial(empty_launch, num_tokens, 4096, 4096, F32) for num_tokens in (4, 8)}
USUAL = re.compile(
    r"Llama-3\.1-8B o, (1|16)|float32, 4"
    r"|fused Llama-3\.1-8B (o|gate_up), (1|16)|fused Llama-3\.1-8B (qkv|down), (1|16), float8"
)
"""The usual launches: every fusion, and every data type; float8 with fusions."""
RARE = [name for name in LAUNCHES if not USUAL.fullmatch(name)]
FEW = [(1, 10, 48), (2, 6, 1030), (2, 40, 300)]
MORE = [(5, 70, 300), (16, 34, 512)]
"""Tokens, outputs, inputs."""
EITHER_KERNEL = pytest.mark.parametrize(
    "launch", [FmaLaunch(rows=4, num_warps=1, max_programs=3), DotLaunch(16, 64, num_warps=1, num_stages=2)]
)
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16])


@pytest.mark.parametrize("has_bias", [False, True])
@DTYPES
@pytest.mark.parametrize("shape", [(1, 5, 48), (2, 3, 1030), (2, 40, 300)], ids=str)
def test_few_rows_are_what_torch_computes(
    has_bias: bool,
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    x_TI, weight_OI, bias_O = inputs(generator, shape, dtype, device)
    bias = bias_O if has_bias else None
    assert_close(skinny_linear(x_TI, weight_OI, bias), skinny_linear_reference(x_TI, weight_OI, bias))


@DTYPES
@pytest.mark.parametrize("shape", [(5, 70, 300), (16, 33, 512)], ids=str)
def test_more_rows_are_what_torch_computes(
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    skip_what_cannot_be_interpreted(shape, dtype, device)
    arguments = inputs(generator, shape, dtype, device)
    assert_close(skinny_linear(*arguments), skinny_linear_reference(*arguments))


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_weights_may_be_float8(num_tokens: int, device: torch.device, generator: torch.Generator) -> None:
    x_TI, weight_OI, bias_O = inputs(generator, (num_tokens, 34, 272), torch.float16, device)
    scales_O = (0.5 + torch.rand(34, generator=generator)).to(device)
    weight_OI = weight_OI.to(torch.float8_e4m3fn)
    expected_TO = skinny_linear_reference(x_TI, weight_OI, bias_O, scales_O)
    assert_close(skinny_linear(x_TI, weight_OI, bias_O, scales_O), expected_TO)


@EITHER_KERNEL
def test_any_launch_gives_the_same(
    launch: FmaLaunch | DotLaunch, device: torch.device, generator: torch.Generator
) -> None:
    """Programs take several tiles each, and the last ones are ragged."""
    x_TI, weight_OI, bias_O = inputs(generator, (3, 21, 80), torch.float32, device)
    actual_TO = skinny_linear(x_TI, weight_OI, bias_O, launch=launch)
    assert_close(actual_TO, skinny_linear_reference(x_TI, weight_OI, bias_O))


@DTYPES
@pytest.mark.parametrize("shape", [*FEW, *MORE], ids=str)
def test_the_activation_equals_a_separate_kernels_bit_for_bit(
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """In float32 the interpreter's sums depend on where a row lies."""
    arguments = inputs(generator, shape, dtype, device)
    skip_what_cannot_be_interpreted(shape, dtype, device)
    expected_TP = gate_mul(skinny_linear(*arguments))
    error = 1e-4 if shape[0] > MAX_FMA_TOKENS and dtype is torch.float32 else 0
    torch.testing.assert_close(skinny_gate_mul(*arguments), expected_TP, rtol=error, atol=error)


@DTYPES
@pytest.mark.parametrize("shape", [*FEW, *MORE], ids=str)
def test_the_sum_equals_a_separate_kernels_bit_for_bit(
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    arguments = inputs(generator, shape, dtype, device)
    skip_what_cannot_be_interpreted(shape, dtype, device)
    residual_TO = torch.randn(*shape[:2], generator=generator).to(dtype).to(device)
    expected_TO = residual_TO.clone()
    add_rms_norm_(skinny_linear(*arguments), expected_TO, torch.ones_like(expected_TO[0]), 1e-5)
    skinny_add_(residual_TO, *arguments)
    torch.testing.assert_close(residual_TO, expected_TO, rtol=0, atol=0)


@DTYPES
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_the_norm_equals_a_separate_kernels(
    dtype: torch.dtype,
    shape: Shape,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    x_TI, *weights = inputs(generator, shape, dtype, device)
    weight_I = torch.randn(shape[2], generator=generator).to(dtype).to(device)
    normed_TI = rms_norm(x_TI, weight_I, 1e-2)
    for product in (skinny_linear, skinny_gate_mul):
        assert_close(product(x_TI, *weights, norm=InputNorm(weight_I, 1e-2)), product(normed_TI, *weights))


def test_fused_products_take_float8_weights(device: torch.device, generator: torch.Generator) -> None:
    for num_tokens in (2, 9):
        x_TI, weight_OI, bias_O = inputs(generator, (num_tokens, 34, 272), torch.float16, device)
        scales_O = (0.5 + torch.rand(34, generator=generator)).to(device)
        arguments = (x_TI, weight_OI.to(torch.float8_e4m3fn), bias_O, scales_O)
        y_TO = skinny_linear(*arguments)
        torch.testing.assert_close(skinny_gate_mul(*arguments), gate_mul(y_TO), rtol=0, atol=0)
        residual_TO = torch.ones_like(y_TO)
        skinny_add_(residual_TO, *arguments)
        torch.testing.assert_close(residual_TO, 1 + y_TO)


@EITHER_KERNEL
def test_any_launch_fuses_the_same(
    launch: FmaLaunch | DotLaunch, device: torch.device, generator: torch.Generator
) -> None:
    arguments = inputs(generator, (3, 42, 80), torch.float32, device)
    y_TO = skinny_linear(*arguments, launch=launch)
    assert_close(skinny_gate_mul(*arguments, launch=launch), gate_mul(y_TO))
    residual_TO = y_TO.clone()
    skinny_add_(residual_TO, *arguments, launch=launch)
    assert_close(residual_TO, 2 * y_TO)


def test_norms_where_all_of_x_is_in_registers() -> None:
    assert norms_input(2, 4096, 2)
    assert not norms_input(3, 4096, 2)
    assert not norms_input(2, 16384, 2)
    assert norms_input(2, 4096, 1)
    assert not norms_input(3, 4096, 1)


def test_rows_may_lie_within_longer_ones(device: torch.device, generator: torch.Generator) -> None:
    wide_TX, weight_OI, _ = inputs(generator, (3, 4, 32), torch.float32, device)
    x_TI, weight_OI = wide_TX[:, 8:24], weight_OI[:, :16].contiguous()
    assert_close(skinny_linear(x_TI, weight_OI), skinny_linear_reference(x_TI, weight_OI))


def test_no_rows_are_no_launch(device: torch.device) -> None:
    assert skinny_linear(torch.empty(0, 8, device=device), torch.empty(3, 8, device=device)).shape == (0, 3)


def test_launches_are_chosen_by_shape() -> None:
    assert choose_launch(1, 4096, 4096, 2) == FmaLaunch(rows=2, num_warps=8, max_programs=4 * 132)
    assert choose_launch(1, 14336, 4096, 2) == FmaLaunch(rows=2, num_warps=16, max_programs=132)
    assert choose_launch(2, 4096, 4096, 2) == FmaLaunch(rows=2, num_warps=8, max_programs=3 * 132)
    normed = choose_launch(2, 4096, 4096, 2, is_normed=True)
    assert normed == FmaLaunch(rows=2, num_warps=8, max_programs=2 * 132), "89 registers"
    assert isinstance(choose_launch(2, 14336, 4096, 2), DotLaunch), "x would not fit the registers"
    assert isinstance(choose_launch(3, 4096, 4096, 2), DotLaunch), "sums would take longer"
    assert choose_launch(2, 4096, 4096, 1) == FmaLaunch(rows=4, num_warps=8, max_programs=2 * 132)
    assert isinstance(choose_launch(3, 4096, 4096, 1), DotLaunch), "too many registers"
    assert isinstance(choose_launch(1, 14336, 4096, 1), DotLaunch), "too many registers"
    assert choose_launch(16, 4096, 128_256, 2) != choose_launch(16, 4096, 4096, 2)


def test_refuses_many_rows_and_weights_without_their_scales(device: torch.device) -> None:
    weight_OI = torch.zeros(2, 8, device=device)
    with pytest.raises(AssertionError, match="17 tokens"):
        skinny_linear(torch.zeros(17, 8, device=device), weight_OI)
    with pytest.raises(AssertionError, match="scales"):
        skinny_linear(torch.zeros(1, 8, device=device).half(), weight_OI.to(torch.float8_e4m3fn))


def skip_what_cannot_be_interpreted(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    if shape[0] > MAX_FMA_TOKENS and dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 wrongly")


def inputs(
    generator: torch.Generator, shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, num_outputs, num_inputs = shape
    x_TI = torch.randn(num_tokens, num_inputs, generator=generator)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator)
    bias_O = 10 * torch.randn(num_outputs, generator=generator)
    return x_TI.to(dtype).to(device), weight_OI.to(dtype).to(device), bias_O.to(dtype).to(device)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of some hundred products may cancel. So errors are also compared with the size of the summed products,
    which is some tens."""
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=10 * rtol)
