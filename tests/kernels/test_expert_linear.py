"""Products of each row with its experts' matrices, and the mixture that they make.

Shape suffixes: T tokens, K experts of a token, N pairs, X experts, I input features, O output features, E hidden size.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.activation import Activation, ClampedSwiglu, Gate
from engine.kernels.expert_linear import (
    ExpertLaunch,
    ExpertMatrices,
    choose_expert_launch,
    expert_linear,
    token_counts_by_launch,
)
from engine.kernels.sort_pairs import MAX_UNSORTED_TOKENS, ExpertPairs
from engine.kernels.sum_pairs import sum_pairs
from engine.kernels.switches import switched
from engine.layers.backend import Expert, ExpertRouter
from engine.layers.fp8 import quantize_rows
from engine.layers.torch_backend import TorchBackend
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import takes_of
from engine.loading.weights import TakeRecorder
from engine.mixture_config import Mixture
from engine.model_config import read_architecture
from engine.models.decoder import Decoder
from tests.kernels.references import expert_linear_reference, gate_mul_reference

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


def empty_launch(
    num_tokens: int,
    num_chosen: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    *,
    is_second: bool = False,
    has_bias: bool = False,
    activation: Activation = Gate.SILU,
) -> None:
    """`dtype`: the dtype of the weights. `is_second`: this is the second product, which gives each token's result."""
    meta = partial(torch.empty, device="meta")
    matrices = ExpertMatrices(
        meta(shape, dtype=dtype),
        meta(shape[:2]) if dtype is FP8 else None,
        meta(shape[:2]) if has_bias else None,
    )
    num_pairs, num_experts = num_tokens * num_chosen, shape[0]
    is_sorted = num_tokens > MAX_UNSORTED_TOKENS
    pairs = ExpertPairs(
        meta(num_tokens, num_chosen, dtype=torch.int32),
        num_experts,
        num_experts,
        meta(num_pairs, dtype=torch.int32) if is_sorted else None,
        meta(num_experts, dtype=torch.int32) if is_sorted else None,
    )
    x = meta(num_pairs if is_second else num_tokens, shape[2], dtype=F32 if dtype is F32 else BF16)
    if is_second:
        expert_linear(x, matrices, pairs, factors_N=meta(num_pairs))
    else:
        expert_linear(x, matrices, pairs, activation=activation)


USUAL = {
    "Qwen3-30B-A3B gate_up, 1": partial(empty_launch, 1, 8, (128, 1536, 2048)),
    "Qwen3-30B-A3B down, 8192": partial(empty_launch, 8192, 8, (128, 2048, 768), is_second=True),
    "Qwen3-30B-A3B gate_up, 1, float8": partial(empty_launch, 1, 8, (128, 1536, 2048), FP8),
    "Qwen3-30B-A3B gate_up, 8192, float8": partial(empty_launch, 8192, 8, (128, 1536, 2048), FP8),
}
RARE = {
    "gpt-oss-20b gate_up, 1": partial(
        empty_launch,
        1,
        4,
        (32, 5760, 2880),
        has_bias=True,
        activation=ClampedSwiglu(alpha=1.702, limit=7.0),
    ),
    "gpt-oss-20b down, 64": partial(empty_launch, 64, 4, (32, 2880, 2880), is_second=True, has_bias=True),
    "Qwen3-30B-A3B down, 8192, float8": partial(empty_launch, 8192, 8, (128, 2048, 768), FP8, is_second=True),
    "Qwen3-30B-A3B down, 1": partial(empty_launch, 1, 8, (128, 2048, 768), is_second=True),
    "Qwen3-30B-A3B gate_up, 64": partial(empty_launch, 64, 8, (128, 1536, 2048)),
    "Mixtral-8x7B tp2 gate_up, 16": partial(empty_launch, 16, 2, (8, 14336, 4096)),
    "Mixtral-8x7B tp2 down, 2048": partial(empty_launch, 2048, 2, (8, 4096, 7168), is_second=True),
    "Qwen3-30B-A3B down, 64, float32": partial(empty_launch, 64, 8, (128, 2048, 768), F32, is_second=True),
}
LAUNCHES = USUAL | RARE


def random_experts(
    generator: torch.Generator, num_tokens: int, num_chosen: int, num_experts: int
) -> torch.Tensor:
    """T x K, int32, none twice in a row; the last expert is never chosen."""
    experts_TK = torch.rand(num_tokens, num_experts - 1, generator=generator).argsort(-1)[:, :num_chosen]
    return experts_TK.to(torch.int32).contiguous()


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_outputs", "num_inputs"),
    [(1, 3, 33, 40), (16, 4, 40, 130), (17, 5, 130, 64), (70, 3, 40, 96)],
)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, FP8])
def test_is_what_torch_computes(
    num_tokens: int,
    num_experts: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Full and partly filled tiles; experts with no tile, one tile and several; the first and the second product."""
    if dtype is BF16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 wrongly")
    is_float8 = dtype is FP8
    x_dtype = F16 if is_float8 else dtype
    plain_XOI = torch.randn(num_experts, num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    weight_XOI, scales_XO1 = quantize_rows(plain_XOI) if is_float8 else (plain_XOI.to(dtype), None)
    has_bias = num_experts % 2 == 0
    matrices = ExpertMatrices(
        weight_XOI.to(device),
        None if scales_XO1 is None else scales_XO1.squeeze(-1).to(device),
        torch.randn(num_experts, num_outputs, generator=generator).to(device) if has_bias else None,
    )
    experts_TK = random_experts(generator, num_tokens, 2, num_experts).to(device)
    pairs = ExpertPairs.of(experts_TK, num_experts, num_experts)
    for num_rows, has_factors in ((num_tokens, False), (2 * num_tokens, True)):
        x = torch.randn(num_rows, num_inputs + 8, generator=generator).to(x_dtype).to(device)[:, :num_inputs]
        factors_N = torch.rand(2 * num_tokens, generator=generator).to(device) if has_factors else None
        found = expert_linear(x, matrices, pairs, factors_N=factors_N)
        expected = expert_linear_reference(x, matrices, experts_TK, factors_N)
        assert found.dtype is x_dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("num_chosen", "num_experts"), [(8, 128), (4, 32), (2, 8), (6, 160), (1, 3)], ids=str
)
@pytest.mark.parametrize("is_wide", [False, True])
def test_each_launch_has_a_number_of_tokens(num_chosen: int, num_experts: int, is_wide: bool) -> None:
    """A worker rehearses these numbers, so that it compiles no kernel later."""

    def launch(num_tokens: int) -> tuple[bool, ExpertLaunch]:
        chosen = choose_expert_launch(num_tokens, num_tokens * num_chosen, num_experts, BF16, is_wide=is_wide)
        return num_tokens > MAX_UNSORTED_TOKENS, chosen

    rehearsed = {launch(count) for count in token_counts_by_launch(num_chosen, num_experts)}
    assert rehearsed == {launch(count) for count in range(1, 5000)}


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(5, F32), (40, F32), (5, F16), (60, F16), (300, F16), (300, BF16)]
)
@pytest.mark.parametrize(
    "activation", [Gate.SILU, Gate.GELU_TANH, ClampedSwiglu(alpha=1.702, limit=0.7)], ids=str
)
def test_an_activation_halves_the_outputs(
    num_tokens: int,
    dtype: torch.dtype,
    activation: Activation,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Tiles of 16 to 128 pairs; the number of gates is no multiple of a block's outputs."""
    if dtype is BF16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 wrongly")
    matrices = ExpertMatrices(
        (torch.randn(4, 2 * 41, 40, generator=generator) / 6).to(dtype).to(device),
        bias_XO=torch.randn(4, 2 * 41, generator=generator).to(device),
    )
    experts_TK = random_experts(generator, num_tokens, 2, 4).to(device)
    x_TI = torch.randn(num_tokens, 40, generator=generator).to(dtype).to(device)
    found_NO = expert_linear(x_TI, matrices, ExpertPairs.of(experts_TK, 4, 4), activation=activation)
    gate_up_NM = expert_linear_reference(x_TI, matrices, experts_TK, None)
    tolerance = {F32: 1e-5, F16: 1e-2, BF16: 5e-2}[dtype]  # the products are rounded before the activation
    expected_NO = gate_mul_reference(gate_up_NM, activation)
    torch.testing.assert_close(found_NO, expected_NO, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [16, 40])
def test_all_rows_of_one_expert(num_tokens: int, device: torch.device, generator: torch.Generator) -> None:
    """A rehearsal has such rows, since its tokens are all the same."""
    weight_XOI = torch.randn(6, 32, 32, generator=generator).to(device)
    experts_TK = torch.full((num_tokens, 1), 4, dtype=torch.int32, device=device)
    x_TI = torch.randn(num_tokens, 32, generator=generator).to(device)
    matrices = ExpertMatrices(weight_XOI)
    found = expert_linear(x_TI, matrices, ExpertPairs.of(experts_TK, 6, 6))
    torch.testing.assert_close(found, x_TI @ weight_XOI[4].T)


@pytest.mark.parametrize("num_tokens", [3, 20, 70])
def test_pairs_with_experts_of_other_ranks_are_not_computed(
    num_tokens: int, device: torch.device, generator: torch.Generator
) -> None:
    """Few tokens, and tiles of 16 and of 64 pairs. Values that these products leave undefined do not reach the sum."""
    num_own_experts = 3
    experts_TK = random_experts(generator, num_tokens, 2, 6).clamp_(max=num_own_experts).to(device)
    experts_TK[0, 0], experts_TK[0, 1] = num_own_experts, num_own_experts  # both are of other ranks
    pairs = ExpertPairs.of(experts_TK, num_own_experts, 6)
    is_here_N = experts_TK.flatten() < num_own_experts
    assert 0 < int(is_here_N.sum()) < len(is_here_N)
    matrices = ExpertMatrices(torch.randn(num_own_experts, 40, 32, generator=generator).to(device))
    factors_N = torch.rand(2 * num_tokens, generator=generator).to(device)
    x_NI = torch.randn(2 * num_tokens, 32, generator=generator).to(device)
    x_NI[~is_here_N] = math.nan
    found_NO = expert_linear(x_NI, matrices, pairs, factors_N=factors_N)
    own_N1 = experts_TK.flatten().masked_fill(~is_here_N, 0).unsqueeze(1)
    expected_NO = expert_linear_reference(x_NI, matrices, own_N1, factors_N)
    torch.testing.assert_close(found_NO[is_here_N], expected_NO[is_here_N])
    found_NO[~is_here_N] = math.nan
    expected_TO = expected_NO.masked_fill(~is_here_N.unsqueeze(1), 0.0).unflatten(0, (num_tokens, 2)).sum(1)
    torch.testing.assert_close(sum_pairs(found_NO, pairs), expected_TO)


@pytest.mark.parametrize(
    ("is_normalized", "activation"),
    [(True, Gate.SILU), (False, Gate.SILU), (True, ClampedSwiglu(alpha=1.702, limit=0.7))],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [3, 16, 17])
def test_the_mixture_is_that_of_the_cpu(
    is_normalized: bool,
    activation: Activation,
    num_tokens: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """The last mixture has biases, too."""
    mixture = Mixture(
        num_experts=5, num_chosen=2, intermediate_size=48, is_normalized=is_normalized, activation=activation
    )
    router_XE, router_bias_X = torch.randn(5, 32, generator=generator), None
    experts = [
        _expert([torch.randn(shape, generator=generator) / 6 for shape in ((48, 32), (48, 32), (32, 48))])
        for _ in range(5)
    ]
    if activation is not Gate.SILU:
        router_bias_X = torch.randn(5, generator=generator)
        biases = [torch.randn(3, 48, generator=generator) for _ in experts]
        experts = [
            replace(expert, biases_I=(bias[0], bias[1]), down_bias_E=bias[2, :32])
            for expert, bias in zip(experts, biases, strict=True)
        ]
    x_TE = torch.randn(num_tokens, 32, generator=generator)
    cpu, all_experts = TorchBackend(), range(5)
    expected = cpu.mixture(mixture, ExpertRouter(router_XE, router_bias_X), experts, cpu.linear, all_experts)(
        x_TE
    )
    gpu = TritonBackend()
    there = [_on(device, expert) for expert in experts]
    router = ExpertRouter(router_XE.to(device), None if router_bias_X is None else router_bias_X.to(device))
    layer = gpu.mixture(mixture, router, there, gpu.linear, all_experts)
    found = layer(x_TE.to(device))
    torch.testing.assert_close(found.cpu(), expected)
    residual_TE = torch.randn(x_TE.shape, generator=generator).to(device)
    expected_sum_TE = residual_TE + found
    with switched(fused_residual=False):
        assert not layer.try_add(x_TE.to(device), residual_TE)
    assert layer.try_add(x_TE.to(device), residual_TE)
    torch.testing.assert_close(residual_TE, expected_sum_TE)
    parts = []
    for rank in range(2):
        here = mixture.experts_on(rank, 2)
        part = gpu.mixture(mixture, router, there[here.start : here.stop], gpu.linear, here)
        parts.append(part(x_TE.to(device)).cpu())
    torch.testing.assert_close(parts[0] + parts[1], expected)


def test_weights_are_asked_for_in_the_order_in_which_they_are_read_ahead(tmp_path: Path) -> None:
    """`takes_of` finds the order by another backend."""
    from tests.factories.models import make_model_dir  # transformers takes seconds to import

    path = make_model_dir(tmp_path, "mixtral", num_local_experts=3)
    architecture, asked = read_architecture(path), TakeRecorder()
    Decoder(architecture, asked, TritonBackend())
    assert asked.takes == takes_of(architecture)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_mixture_in_8_bits_is_one_of_rounded_matrices(
    device: torch.device, generator: torch.Generator
) -> None:
    """The mixture's router is not rounded."""
    mixture = Mixture(num_experts=4, num_chosen=2, intermediate_size=48, is_normalized=True)
    router_XE = torch.randn(4, 32, generator=generator).to(F16).to(device)
    shapes = ((48, 32), (48, 32), (32, 48))
    matrices = [
        [(torch.randn(shape, generator=generator) / 6).to(F16).to(device) for shape in shapes]
        for _ in range(4)
    ]
    rounded = [_expert([_rounded(matrix) for matrix in each]) for each in matrices]
    x_TE = torch.randn(20, 32, generator=generator).to(F16).to(device)
    backend = TritonBackend()
    found = backend.mixture(
        mixture, ExpertRouter(router_XE), [_expert(each) for each in matrices], backend.fp8_linear, range(4)
    )
    expected = backend.mixture(mixture, ExpertRouter(router_XE), rounded, backend.linear, range(4))
    torch.testing.assert_close(found(x_TE), expected(x_TE), rtol=0, atol=4e-3)


def _rounded(matrix_OI: torch.Tensor) -> torch.Tensor:
    values_OI, scales_O1 = quantize_rows(matrix_OI)
    return (values_OI.to(F32) * scales_O1).to(matrix_OI.dtype)


def _expert(matrices: list[torch.Tensor]) -> Expert:
    gate_IE, up_IE, down_EI = matrices
    return Expert(gate_IE, up_IE, down_EI)


def _on(device: torch.device, expert: Expert) -> Expert:
    parts = (expert.gate_IE, expert.up_IE, expert.down_EI)
    gate_IE, up_IE, down_EI = (part.to(device) for part in parts if isinstance(part, torch.Tensor))
    if expert.biases_I is None or expert.down_bias_E is None:
        return Expert(gate_IE, up_IE, down_EI)
    gate_I, up_I = (bias.to(device) for bias in expert.biases_I)
    return Expert(gate_IE, up_IE, down_EI, (gate_I, up_I), expert.down_bias_E.to(device))
