"""Products of few rows that torch's library computes where it was timed to be faster."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.batch import StepLimits
from engine.gpu.device_parts import DeviceParts
from engine.kernels.switches import switched
from engine.layers.triton_backend import TritonBackend
from engine.layers.triton_linear import Work
from tests.kernels.device_parts import make_parts
from tests.kernels.references import skinny_linear_reference
from tests.kernels.test_launches import counting_launches

NUM_LAYERS = 3


class FakeTimer:
    """Returns given times: our kernel's first, then the library's; computes each work once."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = list(times_s)
        self.results: list[list[torch.Tensor]] = []

    def __call__(self, works: Sequence[Work]) -> float:
        self.results.append([work() for work in works])
        return self._times_s.pop(0)


def linears(backend: TritonBackend, generator: torch.Generator, device: torch.device) -> list[torch.Tensor]:
    """Makes a product in each layer; returns their weights."""
    weights = [torch.randn(6, 32, generator=generator).to(device) for _ in range(NUM_LAYERS)]
    made = [backend.linear(weight_OI, None) for weight_OI in weights]
    x_TI = torch.zeros(3, 32, device=device)
    made[0](x_TI)  # a step asks for it
    return weights


@pytest.mark.parametrize(("librarys_s", "is_library"), [(0.89, True), (0.91, False), (2.0, False)])
def test_the_library_computes_products_at_which_it_is_clearly_faster(
    librarys_s: float,
    is_library: bool,
    device: torch.device,
    generator: torch.Generator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = TritonBackend()
    weights = linears(backend, generator, device)
    timer = FakeTimer(1.0, librarys_s)
    with caplog.at_level(logging.INFO):
        backend.timed_products.choose(timer)
    assert [len(results) for results in timer.results] == [NUM_LAYERS] * 2
    for ours_TO, librarys_TO in zip(*timer.results, strict=True):
        torch.testing.assert_close(ours_TO, librarys_TO, rtol=1e-5, atol=1e-4)
    assert "products of 4 rows, 32 x 6: 333333.3 us by Baton's kernel" in caplog.text
    assert caplog.text.rstrip().endswith(
        "Baton will use torch's library" if is_library else "Baton will use Baton's kernel"
    )

    linear = backend.linear(weights[0], None)
    for num_tokens, is_chosen in ((3, True), (4, True), (2, False), (5, False)):
        x_TI = torch.randn(num_tokens, 32, generator=generator).to(device)
        with counting_launches() as launches:
            y_TO = linear(x_TI)
        assert launches.total() == (0 if is_chosen and is_library else 1), num_tokens
        torch.testing.assert_close(y_TO, skinny_linear_reference(x_TI, weights[0]), rtol=1e-5, atol=1e-4)


def test_a_choice_is_not_timed_again(device: torch.device, generator: torch.Generator) -> None:
    backend = TritonBackend()
    weights = linears(backend, generator, device)
    backend.timed_products.choose(FakeTimer(1.0, 0.5))
    backend.timed_products.choose(FakeTimer())
    backend.linear(weights[0], None)(torch.zeros(1, 32, device=device))
    timer = FakeTimer(1.0, 0.5)
    backend.timed_products.choose(timer)
    assert [len(result_TO) for result_TO in timer.results[0]] == [1] * (NUM_LAYERS + 1)


def test_a_switch_leaves_all_to_our_kernels(device: torch.device, generator: torch.Generator) -> None:
    backend = TritonBackend()
    weights = linears(backend, generator, device)
    backend.timed_products.choose(FakeTimer(1.0, 0.5))
    with switched(timed_products=False), counting_launches() as launches:
        backend.linear(weights[0], None)(torch.zeros(2, 32, device=device))
    assert launches == {"skinny_linear_fma": 1}


def test_the_library_never_multiplies_8_bit_weights(device: torch.device, generator: torch.Generator) -> None:
    backend = TritonBackend()
    linear = backend.fp8_linear(torch.randn(6, 32, generator=generator).half().to(device), None)
    linear(torch.zeros(3, 32, dtype=torch.float16, device=device))
    backend.timed_products.choose(FakeTimer())


@pytest.fixture
def parts(tmp_path: Path, device: torch.device) -> DeviceParts:
    _, parts, _ = make_parts(tmp_path, device, StepLimits(8, 16, 64))
    return parts


def test_only_unfused_products_of_steps_are_timed(parts: DeviceParts) -> None:
    """Eight decodes: the projections to queries, keys and values and to logits. One decode: none."""
    parts.forward.rehearse(1, 1)
    parts.backend.timed_products.choose(FakeTimer())
    parts.forward.rehearse(8, 1)
    timer = FakeTimer(1.0, 2.0, 1.0, 2.0)
    parts.backend.timed_products.choose(timer)
    assert len(timer.results) == 4


def test_without_a_gpu_nothing_is_timed(
    parts: DeviceParts, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.forward.rehearse(8, 1)
    timer = FakeTimer(1.0, 2.0, 1.0, 2.0)
    monkeypatch.setattr("engine.gpu.device_parts.GpuTimer", lambda: timer)
    with switched(timed_products=False):
        parts.choose_products()
    assert timer.results == []
    parts.choose_products()
    assert len(timer.results) == (4 if device.type == "cuda" else 0)
