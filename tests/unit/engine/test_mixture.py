"""Mixtures of experts on a CPU: routing, products, and rows that do not depend on each other.

Shape suffixes: T tokens, X experts, E hidden size, I intermediate size of an expert.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from baton.config import ModelConfig
from baton.sampling import MAX_LOGPROBS, SamplingParams
from engine.activation import ClampedSwiglu
from engine.layers.backend import Backend, Expert, ExpertRouter, LinearLayer, Matrix, MixtureLayer
from engine.layers.fp8 import quantize_rows
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.mixture import route
from engine.layers.native_backend import NativeBackend
from engine.layers.native_mixture import NativeMixture
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import load_model
from engine.mixture_config import Mixture
from engine.native.elementwise import ElementwiseKernels
from engine.native.library import native_library
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver

CPU = torch.device("cpu")
HIDDEN, INNER = 64, 96
MIXTURE = Mixture(num_experts=7, num_chosen=3, intermediate_size=INNER, is_normalized=True)
ALL = range(MIXTURE.num_experts)
EXPERTS: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=MAX_LOGPROBS)


def native() -> NativeBackend:
    library = native_library()
    assert library is not None
    return NativeBackend(library)


def random_experts(dtype: torch.dtype, bits: Any = None) -> tuple[torch.Tensor, list[Expert]]:
    """A router and its experts."""
    generator = torch.Generator().manual_seed(0)

    def matrix(num_outputs: int, num_inputs: int) -> torch.Tensor:
        scaled: torch.Tensor = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
        return scaled.to(dtype)

    def kept(num_outputs: int, num_inputs: int) -> Matrix:
        plain = matrix(num_outputs, num_inputs)
        return plain if bits is None else GroupedWeight.quantize(plain, bits)

    router_XE = 3.0 * matrix(MIXTURE.num_experts, HIDDEN)
    return router_XE, [
        Expert(kept(INNER, HIDDEN), kept(INNER, HIDDEN), kept(HIDDEN, INNER))
        for _ in range(MIXTURE.num_experts)
    ]


def as_floats(matrix: Matrix) -> torch.Tensor:
    return (matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized()).to(torch.float64)


def literally(x_TE: torch.Tensor, router_XE: torch.Tensor, experts: list[Expert]) -> torch.Tensor:
    """Row by row, in float64."""
    rows = []
    for x_E in x_TE.to(torch.float64):
        probabilities = (router_XE.to(torch.float64) @ x_E).softmax(0)
        best = sorted(range(len(experts)), key=lambda n: -probabilities[n].item())[: MIXTURE.num_chosen]
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for n in best:
            gate, up, down = (
                as_floats(m) for m in (experts[n].gate_IE, experts[n].up_IE, experts[n].down_EI)
            )
            row += probabilities[n] / probabilities[best].sum() * (down @ (F.silu(gate @ x_E) * (up @ x_E)))
        rows.append(row)
    return torch.stack(rows)


def made(backend: Backend, router_XE: torch.Tensor, experts: Iterable[Expert]) -> MixtureLayer:
    return backend.mixture(MIXTURE, ExpertRouter(router_XE), experts, backend.linear, ALL)


V3 = Mixture(
    num_experts=12,
    num_chosen=3,
    intermediate_size=INNER,
    is_normalized=True,
    is_sigmoid=True,
    has_choice_bias=True,
    num_groups=4,
    num_chosen_groups=2,
    num_compared=2,
    scale=2.5,
)


@pytest.mark.parametrize(
    "mixture",
    [
        V3,
        replace(V3, is_normalized=False, scale=1.0),
        replace(V3, num_groups=1, num_chosen_groups=1),
        replace(V3, is_sigmoid=False, has_choice_bias=False, num_compared=1, is_normalized=False),
    ],
    ids=["v3", "not normalized", "one group", "v2"],
)
def test_experts_are_chosen_within_the_best_groups(mixture: Mixture) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TX = 2.0 * torch.randn(50, 12, generator=generator)
    bias_X = 0.4 * torch.randn(12, generator=generator) if mixture.has_choice_bias else None
    experts_TK, weights_TK = route(logits_TX, mixture, bias_X)
    num_moved = 0
    for logits_X, experts_K, weights_K in zip(logits_TX, experts_TK, weights_TK, strict=True):
        scores = (logits_X.sigmoid() if mixture.is_sigmoid else logits_X.softmax(0)).tolist()
        ranked = scores if bias_X is None else [s + b for s, b in zip(scores, bias_X.tolist(), strict=True)]
        size = 12 // mixture.num_groups
        groups = [range(first, first + size) for first in range(0, 12, size)]
        groups.sort(key=lambda group: -sum(sorted(ranked[n] for n in group)[-mixture.num_compared :]))
        allowed = [n for group in groups[: mixture.num_chosen_groups] for n in group]
        best = sorted(allowed, key=lambda n: -ranked[n])[:3]
        assert experts_K.tolist() == best
        num_moved += set(best) != set(sorted(range(12), key=lambda n: -scores[n])[:3])
        total = sum(scores[n] for n in best) if mixture.is_normalized else 1.0
        expected = [mixture.scale * scores[n] / total for n in best]
        torch.testing.assert_close(weights_K, torch.tensor(expected), rtol=1e-5, atol=1e-7)
    assert num_moved > 5, "bias and groups decide"


@pytest.mark.parametrize("make_backend", [TorchBackend, native])
@pytest.mark.parametrize(
    ("dtype", "bits", "tolerance"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 3e-2),
        (torch.float32, 8, 3e-2),
        (torch.float32, 4, 3e-2),
    ],
    ids=str,
)
def test_a_mixture_is_what_its_experts_compute(
    make_backend: Any, dtype: torch.dtype, bits: Any, tolerance: float
) -> None:
    """Our own kernels round inputs of products in 4 and 8 bits to 8 bits."""
    router_XE, experts = random_experts(dtype, bits)
    x_TE = torch.randn(19, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = made(make_backend(), router_XE, experts)(x_TE)
    assert found.dtype is dtype
    expected = literally(x_TE, router_XE, experts)
    torch.testing.assert_close(found.to(torch.float64), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("make_backend", [TorchBackend, native])
def test_a_mixture_with_biases_and_a_clamped_gate(make_backend: Any) -> None:
    """gpt-oss has such mixtures: each product has a bias, and gates and ups reach the limit."""
    router_XE, experts = random_experts(torch.float32)
    generator = torch.Generator().manual_seed(4)
    router_bias_X = torch.randn(MIXTURE.num_experts, generator=generator)
    gate_bias_I, up_bias_I, down_bias_E = (
        torch.randn(size, generator=generator) for size in (INNER, INNER, HIDDEN)
    )
    experts = [replace(e, biases_I=(gate_bias_I, up_bias_I), down_bias_E=down_bias_E) for e in experts]
    mixture = replace(MIXTURE, activation=ClampedSwiglu(alpha=1.702, limit=0.7))
    x_TE = torch.randn(19, HIDDEN, generator=generator)
    backend = make_backend()
    found = backend.mixture(mixture, ExpertRouter(router_XE, router_bias_X), experts, backend.linear, ALL)(
        x_TE
    )
    for x_E, found_E in zip(x_TE, found, strict=True):
        best = (router_XE @ x_E + router_bias_X).topk(MIXTURE.num_chosen)
        expected_E = torch.zeros(HIDDEN)
        for weight, n in zip(best.values.softmax(0), best.indices.tolist(), strict=True):
            gate_I = (as_floats(experts[n].gate_IE).float() @ x_E + gate_bias_I).clamp(max=0.7)
            up_I = (as_floats(experts[n].up_IE).float() @ x_E + up_bias_I).clamp(-0.7, 0.7)
            inner_I = (up_I + 1) * gate_I * torch.sigmoid(1.702 * gate_I)
            expected_E += weight * (as_floats(experts[n].down_EI).float() @ inner_I + down_bias_E)
        torch.testing.assert_close(found_E, expected_E, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_mixed_here", [True, False])
def test_gates_and_ups_of_different_kinds(is_mixed_here: bool) -> None:
    """GGUF files may have such gates and ups, in all experts or in one."""
    router_XE, experts = random_experts(torch.float32, 4)
    in_8_bits = random_experts(torch.float32, 8)[1]
    experts = [
        replace(each, up_IE=other.up_IE) if is_mixed_here or number == 2 else each
        for number, (each, other) in enumerate(zip(experts, in_8_bits, strict=True))
    ]
    x_TE = torch.randn(19, HIDDEN, generator=torch.Generator().manual_seed(1))
    mixture = made(native(), router_XE, experts)
    assert isinstance(mixture, NativeMixture) is is_mixed_here
    expected = literally(x_TE, router_XE, experts)
    torch.testing.assert_close(mixture(x_TE).to(torch.float64), expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kept", ["numbers", "groups", "fp8"])
@pytest.mark.parametrize("make_backend", [TorchBackend, native])
def test_ranks_with_whole_experts_sum_up_to_the_mixture(make_backend: Any, kept: str, num_ranks: int) -> None:
    """There are 7 experts. If a row takes none of a rank's experts, it is 0 on this rank."""
    backend = make_backend()
    router_XE, experts = random_experts(torch.float32, 8 if kept == "groups" else None)
    linear = backend.fp8_linear if kept == "fp8" else backend.linear
    x_TE = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(4))
    whole_TE = backend.mixture(MIXTURE, ExpertRouter(router_XE), experts, linear, ALL)(x_TE).clone()
    experts_TK, _ = route(x_TE @ router_XE.T, MIXTURE)
    sum_TE = torch.zeros_like(whole_TE)
    for rank in range(num_ranks):
        here = MIXTURE.experts_on(rank, num_ranks)
        own = experts[here.start : here.stop]
        part_TE = backend.mixture(MIXTURE, ExpertRouter(router_XE), own, linear, here)(x_TE)
        is_elsewhere_T = ((experts_TK < here.start) | (experts_TK >= here.stop)).all(1)
        assert torch.equal((part_TE == 0).all(1), is_elsewhere_T)
        sum_TE += part_TE
    torch.testing.assert_close(sum_TE, whole_TE)


@pytest.mark.parametrize("num_pairs", [1, 40])
@pytest.mark.parametrize("width", [1, 83, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_kernel_sums_pairs_as_torch_does(dtype: torch.dtype, width: int, num_pairs: int) -> None:
    """This includes tokens without a pair. Any number of threads gives the same bits."""
    kernels = ElementwiseKernels(native().library)
    generator = torch.Generator().manual_seed(5)
    y_PE = torch.randn(num_pairs, width, generator=generator).to(dtype)
    tokens_P = torch.randint(0, 9, (num_pairs,), generator=generator)
    weights_P = torch.rand(num_pairs, generator=generator)
    before = torch.get_num_threads()
    sums: list[torch.Tensor] = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        sums.append(y_PE.new_empty(9, width))
        kernels.sum_pairs(y_PE, tokens_P, weights_P, sums[-1])
    torch.set_num_threads(before)
    assert torch.equal(*sums)
    expected_TE = torch.zeros(9, width).index_add_(0, tokens_P, y_PE * weights_P.unsqueeze(1))
    torch.testing.assert_close(sums[0], expected_TE.to(dtype))


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_is_the_row_among_others_to_the_bit(dtype: torch.dtype, bits: Any) -> None:
    router_XE, experts = random_experts(dtype, bits)
    mixture = made(native(), router_XE, experts)
    x_TE = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    together = mixture(x_TE)
    for size in (1, 2, 7):
        parts = [mixture(x_RE).clone() for x_RE in x_TE.split(size)]
        assert torch.equal(torch.cat(parts), together), f"steps of {size}"
    reversed_TE = mixture(x_TE.flip(0))
    assert torch.equal(reversed_TE.flip(0), together)


def test_an_expert_without_rows_multiplies_nothing() -> None:
    """An expert with rows multiplies only these."""
    router_XE, experts = random_experts(torch.float32)
    rows: list[tuple[int, int]] = []

    class Counting(TorchBackend):
        def counted(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
            layer, number = self.linear(weight_OI, bias_O), len(made_layers)
            made_layers.append(layer)

            def multiply(x_TI: Any) -> torch.Tensor:
                rows.append((number, len(x_TI)))
                return layer(x_TI)

            return multiply

    made_layers: list[LinearLayer] = []
    backend = Counting()
    mixture = backend.mixture(MIXTURE, ExpertRouter(router_XE), experts, backend.counted, ALL)
    x_TE = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(3))
    mixture(x_TE)
    experts_TK, _ = route(x_TE @ router_XE.T, MIXTURE)
    taken = sorted(set(experts_TK.flatten().tolist()))
    assert len(taken) < MIXTURE.num_experts
    assert rows == [
        (2 * expert + part, int((experts_TK == expert).sum())) for expert in taken for part in (0, 1)
    ]


@pytest.mark.parametrize("is_normalized", [True, False])
def test_routing(is_normalized: bool) -> None:
    mixture = Mixture(num_experts=4, num_chosen=2, intermediate_size=1, is_normalized=is_normalized)
    odds = torch.tensor([[1.0, 4.0, 3.0, 2.0], [6.0, 1.0, 1.0, 2.0]])
    experts_TK, weights_TK = route(odds.log().to(torch.bfloat16), mixture)
    assert experts_TK.tolist() == [[1, 2], [0, 3]]
    expected = [[4 / 7, 3 / 7], [6 / 8, 2 / 8]] if is_normalized else [[0.4, 0.3], [0.6, 0.2]]
    assert weights_TK.dtype is torch.float32
    torch.testing.assert_close(weights_TK, torch.tensor(expected), rtol=0, atol=4e-3)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_a_request_keeps_its_numbers_whatever_runs_beside_it(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    """So after its worker was killed, a request whose prompt is computed again elsewhere goes on as before."""
    path = make_model_dir(tmp_path / "model", architecture, **EXPERTS[architecture])
    config = ModelConfig.model_validate({"dtype": "float32", "quantization": quantization})
    model = load_model(config, path, CPU)
    prompt = [(31 * i) % 290 + 3 for i in range(23)]

    def logprobs(others: list[list[int]], chunk: int = 8) -> list[Any]:
        driver = StepDriver(model)
        request = driver.add("a", prompt, PARAMS)
        beside = [driver.add(f"other-{n}", other, PARAMS) for n, other in enumerate(others)]
        while len(request.outputs) < 6:
            driver.step({r.request_id: min(chunk, r.num_tokens - r.num_computed) for r in (request, *beside)})
        return request.logprobs

    alone = logprobs([])
    assert logprobs([], chunk=1) == logprobs([], chunk=23) == alone
    assert logprobs([[(7 * i) % 290 + 3 for i in range(length)] for length in (3, 40, 61)]) == alone


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_are_kept_in_fewer_bits_and_the_router_in_its_own(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    """The result equals that of a model whose matrices, except routers, were rounded before."""
    path, rounded = (
        make_model_dir(tmp_path / name, architecture, **EXPERTS[architecture])
        for name in ("model", "rounded")
    )
    tensors = load_file(rounded / "model.safetensors")
    for name, tensor in tensors.items():
        is_kept = name.endswith(".gate.weight") or (quantization == "fp8" and "layers" not in name)
        if tensor.ndim == 2 and not is_kept:
            tensors[name] = rounded_to(quantization, tensor)
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        StepDriver(
            load_model(
                ModelConfig.model_validate({"dtype": "float32", "quantization": kept}),
                folder,
                CPU,
                TorchBackend(),
            )
        )
        for kept, folder in ((quantization, path), ("none", rounded))
    )
    prompt = {"a": list(range(3, 40))}
    assert found.generate(prompt, 12) == expected.generate(prompt, 12)


def rounded_to(quantization: str, matrix_OI: torch.Tensor) -> torch.Tensor:
    if quantization == "int8":
        return GroupedWeight.quantize(matrix_OI, 8).dequantized()
    values_OI, scales_O1 = quantize_rows(matrix_OI)
    return values_OI.to(torch.float32) * scales_O1
