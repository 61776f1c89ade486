"""Whether this machine computes correctly: each kernel, one graph, one sampled step.

Takes a minute, including the compilation.

Each kernel is launched three times on the same inputs, and must give the same bits. Different bits mean a
race. Some assemblers cause one: they reuse the registers of a product that is still running.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import smoke_attention, smoke_fused, smoke_latents, smoke_rows, smoke_sampling
from benchmarks.gpu.measure import make_recorder, relative_error, synchronize
from benchmarks.gpu.precompile import precompile
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from benchmarks.gpu.smoke_case import Maker, Outputs, Shapes, SmokeCase
from engine.kernels.gate_mul import gate_mul
from engine.kernels.rms_norm import add_rms_norm_
from tests.kernels.references import add_rms_norm_reference_, gate_mul_reference

PART = "smoke"
NUM_LAUNCHES = 3
COMPILING_S = 40.0
"""Seconds to precompile all launches on several cores. Kernels that are not done by then are compiled in the
checks."""


def run(setting: Setting, emit: Emit) -> None:
    shapes = Shapes.of(setting)
    works = [partial(_launch_each, maker) for maker in makers(shapes)]
    precompile(setting, works, time.monotonic() + COMPILING_S)
    for maker in makers(shapes):
        for case in maker():
            guarded(emit, PART, case.name, partial(_check, setting, case))
    guarded(emit, PART, "a graph", partial(_graph, setting, shapes))
    guarded(emit, PART, "a sampled step", partial(_sampled_step, shapes))


def makers(shapes: Shapes) -> list[Maker]:
    modules = (smoke_fused, smoke_rows, smoke_attention, smoke_latents, smoke_sampling)
    return [maker for module in modules for maker in module.makers(shapes)]


def _launch_each(maker: Maker) -> None:
    for case in maker():
        case.launch()


def _check(setting: Setting, case: SmokeCase) -> Iterator[Row]:
    runs = [case.launch() for _ in range(1 if setting.is_dry else NUM_LAUNCHES)]
    synchronize(setting.device)
    error = max(error_of(got, want) for got, want in zip(runs[0], case.reference(), strict=True))
    is_steady = all(same_bits(run, runs[0]) for run in runs)
    yield Row(
        PART,
        case.name,
        f"{error:.1e} off",
        f"at most {case.max_error:g}; {len(runs)} launches"
        + ("" if is_steady else " gave other bits: a race"),
        is_failed=not error <= case.max_error or not is_steady,
        figures={"error": error, "is_steady": is_steady},
    )


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The error relative to the reference's norm. For integers, the share of elements that differ."""
    assert got.shape == want.shape, f"{tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.cpu(), want.cpu()
    if not want.is_floating_point() or torch.equal(got.double(), want.double()):
        return float((got.double() != want.double()).double().mean())
    return relative_error(got, want)


def same_bits(some: Outputs, others: Outputs) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(some, others, strict=True)
    )


def _graph(setting: Setting, shapes: Shapes) -> Iterator[Row]:
    """Records two launches on one input, and replays them on another input."""
    x_TM = shapes.randn(shapes.tokens, 2 * shapes.hidden)
    residual_TE, weight_E = shapes.randn(shapes.tokens, shapes.hidden), shapes.randn(shapes.hidden)
    buffer_TM, buffer_TE = torch.zeros_like(x_TM), torch.zeros_like(residual_TE)
    given_TE, replay = make_recorder(setting.device).record(
        lambda: add_rms_norm_(gate_mul(buffer_TM), buffer_TE, weight_E, 1e-5)
    )
    buffer_TM.copy_(x_TM)
    buffer_TE.copy_(residual_TE)
    replay()
    synchronize(setting.device)
    want_TE = add_rms_norm_reference_(gate_mul_reference(x_TM), residual_TE, weight_E, 1e-5)
    error = error_of(given_TE, want_TE)
    yield Row(
        PART,
        "a graph",
        f"{error:.1e} off",
        f"at most {shapes.max_error:g}"
        + ("; a CPU has none: the launches were repeated" if setting.is_dry else ""),
        is_failed=not error <= shapes.max_error,
        figures={"error": error},
    )


def _sampled_step(shapes: Shapes) -> Iterator[Row]:
    found, expected = smoke_sampling.sampled_step(shapes)
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    yield Row(
        PART,
        "a sampled step",
        f"{num_equal} of {len(expected)} tokens equal",
        f"{found}, on the host {expected}",
        is_failed=found != expected,
        figures={"equal": num_equal, "rows": len(expected)},
    )
