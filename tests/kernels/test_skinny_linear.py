"""Matrix products with few rows."""

from functools import partial

import pytest
import torch

from engine.kernels.skinny_linear import choose_launch, skinny_linear, skinny_linear_reference
from engine.kernels.skinny_linear_dot import DotLaunch
from engine.kernels.skinny_linear_fma import FmaLaunch

SHAPES = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B tp8 o": (4096, 512),
    "Qwen3-8B down": (4096, 12288),
}


def empty_launch(num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight_OI = torch.empty(num_outputs, num_inputs, dtype=dtype, device="meta")
    scales_O = torch.empty(num_outputs, device="meta") if dtype is torch.float8_e4m3fn else None
    x_dtype = torch.float32 if dtype is torch.float32 else torch.bfloat16
    skinny_linear(
        torch.empty(num_tokens, num_inputs, dtype=x_dtype, device="meta"), weight_OI, None, scales_O
    )


LAUNCHES = {
    f"{name}, {num_tokens}{', float8' if dtype is torch.float8_e4m3fn else ''}": partial(
        empty_launch, num_tokens, *shape, dtype
    )
    for name, shape in SHAPES.items()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    for num_tokens in (1, 2, 4, 16)
} | {
    f"float32, {num_tokens}": partial(empty_launch, num_tokens, 4096, 4096, torch.float32)
    for num_tokens in (4, 8)
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs"), [(1, 5, 48), (2, 3, 1030), (3, 40, 300)]
)
def test_few_rows_are_what_torch_computes(
    has_bias: bool,
    dtype: torch.dtype,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    x_TI, weight_OI, bias_O = inputs(generator, num_tokens, num_outputs, num_inputs, dtype, device)
    bias = bias_O if has_bias else None
    assert_close(skinny_linear(x_TI, weight_OI, bias), skinny_linear_reference(x_TI, weight_OI, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_outputs", "num_inputs"), [(5, 70, 300), (16, 33, 512)])
def test_more_rows_are_what_torch_computes(
    dtype: torch.dtype,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 wrongly")
    arguments = inputs(generator, num_tokens, num_outputs, num_inputs, dtype, device)
    assert_close(skinny_linear(*arguments), skinny_linear_reference(*arguments))


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_weights_may_be_float8(num_tokens: int, device: torch.device, generator: torch.Generator) -> None:
    x_TI, weight_OI, bias_O = inputs(generator, num_tokens, 34, 272, torch.float16, device)
    scales_O = (0.5 + torch.rand(34, generator=generator)).to(device)
    weight_OI = weight_OI.to(torch.float8_e4m3fn)
    expected_TO = skinny_linear_reference(x_TI, weight_OI, bias_O, scales_O)
    assert_close(skinny_linear(x_TI, weight_OI, bias_O, scales_O), expected_TO)


@pytest.mark.parametrize(
    "launch", [FmaLaunch(rows=2, num_warps=1, max_programs=3), DotLaunch(16, 64, num_warps=1, num_stages=2)]
)
def test_any_launch_gives_the_same(
    launch: FmaLaunch | DotLaunch, device: torch.device, generator: torch.Generator
) -> None:
    """Programs take several tiles each, and the last ones are ragged."""
    x_TI, weight_OI, bias_O = inputs(generator, 3, 21, 80, torch.float32, device)
    actual_TO = skinny_linear(x_TI, weight_OI, bias_O, launch=launch)
    assert_close(actual_TO, skinny_linear_reference(x_TI, weight_OI, bias_O))


def test_rows_may_lie_within_longer_ones(device: torch.device, generator: torch.Generator) -> None:
    wide_TX, weight_OI, _ = inputs(generator, 3, 4, 32, torch.float32, device)
    x_TI, weight_OI = wide_TX[:, 8:24], weight_OI[:, :16].contiguous()
    assert_close(skinny_linear(x_TI, weight_OI), skinny_linear_reference(x_TI, weight_OI))


def test_no_rows_are_no_launch(device: torch.device) -> None:
    assert skinny_linear(torch.empty(0, 8, device=device), torch.empty(3, 8, device=device)).shape == (0, 3)


def test_launches_are_chosen_by_shape() -> None:
    assert choose_launch(1, 4096, 4096, 2) == FmaLaunch(rows=2, num_warps=8, max_programs=4 * 132)
    assert choose_launch(1, 14336, 4096, 2) == FmaLaunch(rows=2, num_warps=16, max_programs=132)
    assert isinstance(choose_launch(2, 14336, 4096, 2), DotLaunch), "x would not fit the registers"
    assert isinstance(choose_launch(5, 4096, 4096, 2), DotLaunch)
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


def inputs(
    generator: torch.Generator,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TI = torch.randn(num_tokens, num_inputs, generator=generator)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator)
    bias_O = 10 * torch.randn(num_outputs, generator=generator)
    return x_TI.to(dtype).to(device), weight_OI.to(dtype).to(device), bias_O.to(dtype).to(device)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of some hundred products cancel: errors are compared with their size, some tens, too."""
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=10 * rtol)
