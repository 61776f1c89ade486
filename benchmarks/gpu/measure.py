"""How long work takes on a device, and the two ceilings to compare with. Knows no model.

On a GPU, CUDA events around queued work measure the time. On a CPU, in dry runs, the host's clock measures
it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from benchmarks.gpu.setting import Setting
from engine.gpu.graphs import CudaGraphs, Recorder, Repeater

Work = Callable[[], object]

COPY_BYTES = 4 * 2**30
"""Bytes of the copy that measures the memory's speed: far more than any cache can store."""
MATMUL_SIZE = 8192
ROUNDS = 20
WARM_UP = 3
MAX_ERROR = 8e-2
"""Limit for the error of bfloat16 logits after some 35 layers. Both sides round differently. Real faults
differ by far more."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches on the simplest work of two kinds, measured in this run."""

    bytes_per_s: float
    """For a large copy: bytes read plus bytes written."""
    flops_per_s: float
    """For a large matrix product on random data, in the dtype that models use."""


def measure_ceilings(setting: Setting, dtype: torch.dtype) -> Ceilings:
    """Measures both ceilings; takes about a second on a GPU."""
    device = setting.device
    num_bytes = 2**16 if setting.is_dry else COPY_BYTES
    source = torch.empty(num_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = seconds(device, partial(target.copy_, source), ROUNDS)
    assert torch.equal(target, source), "the copy differs from its source"
    size = 32 if setting.is_dry else MATMUL_SIZE
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul_s = seconds(device, partial(torch.matmul, a, b), ROUNDS)
    return Ceilings(2 * num_bytes / copy_s, 2 * size**3 / matmul_s)


def seconds(device: torch.device, work: Work, rounds: int) -> float:
    """The median over `rounds` consecutive runs, after a warm-up."""
    return median(all_seconds(device, [work], rounds))


@torch.inference_mode()
def all_seconds(device: torch.device, works: Sequence[Work], rounds: int) -> list[float]:
    """Seconds of each round. Runs `works` in turn, so that no cache can keep all their inputs."""
    for number in range(max(WARM_UP, len(works)) if device.type == "cuda" else 0):
        works[number % len(works)]()
    if device.type == "cuda":
        return _by_events(works, rounds)
    times = []
    for number in range(rounds):
        start = time.perf_counter()
        works[number % len(works)]()
        times.append(time.perf_counter() - start)
    return times


def _by_events(works: Sequence[Work], rounds: int) -> list[float]:
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for number in range(rounds):
        works[number % len(works)]()
        marks[number + 1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


@torch.inference_mode()
def wall_seconds(device: torch.device, work: Work, rounds: int) -> float:
    """The median time until the result is available; queueing and computing both count.

    `work` runs once more than `rounds`: the first time does not count.
    """
    times = []
    for _ in range(1 + rounds):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_recorder(device: torch.device) -> Recorder:
    """A recorder that uses graphs if the device has them."""
    return CudaGraphs() if device.type == "cuda" else Repeater()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all elements; NaN if `got` or `want` contains NaN."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())
