"""Traces of PyTorch's profiler: written for a browser (chrome://tracing or Perfetto), and summarized here."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import synchronize
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting
from kv_transfer.cuda.copy_kernel import NAME as COPY_KERNEL

NUM_WARM = 3
NUM_TRACED = NUM_WARM + 1
"""How often `trace_work` does its work."""
NUM_SHOWN = 8
"""How many of the slowest kernels the summary names."""
Event = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class KernelSums:
    """Times of some launches on one stream, in microseconds."""

    num_launches: int
    kernels_us: float
    """The sum of the times of all kernels."""
    gaps_us: float
    """The time between the first kernel's start and the last kernel's end in which no kernel ran."""
    span_us: float
    by_name: dict[str, tuple[int, float]]
    """Number of launches and time of the slowest kernels, by name."""


@torch.inference_mode()
def trace_work(setting: Setting, part: str, title: str, work: Callable[[], object]) -> Row:
    """Traces one step: the times of its kernels, and of the gaps between them. `work` queues one such step."""
    for _ in range(NUM_WARM):
        work()
    synchronize(setting.device)
    with profiled(setting) as profile:
        work()
    path = setting.folder_for_files() / f"step-{re.sub(r'[^A-Za-z0-9.]+', '-', title)}.json.gz"
    sums = sum_kernels(write_trace(profile, path))
    return Row(
        part,
        f"{title}: one step",
        f"{sums.num_launches} launches, {sums.kernels_us:,.0f} us",
        f"{sums.gaps_us:,.0f} us between them, {sums.span_us:,.0f} in all; {path.name}"
        + ("" if setting.is_dry or setting.out else ", not kept without --out"),
        is_failed=not setting.is_dry and sums.num_launches == 0,
        figures={
            "launches": sums.num_launches,
            "kernels_us": sums.kernels_us,
            "gaps_us": sums.gaps_us,
            "span_us": sums.span_us,
            "by_name": sums.by_name,
        },
    )


def sum_kernels(events: Iterable[Event]) -> KernelSums:
    """The sums over the kernels in a trace's events."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    launches = Counter(str(event["name"]) for event in kernels)
    times = dict.fromkeys(launches, 0.0)
    for event in kernels:
        times[event["name"]] += float(event["dur"])
    most = sorted(times, key=lambda name: -times[name])[:NUM_SHOWN]
    busy = merged(spans(kernels)[0])
    return KernelSums(
        num_launches=len(kernels),
        kernels_us=sum(times.values()),
        gaps_us=sum(later[0] - earlier[1] for earlier, later in pairwise(busy)),
        span_us=busy[-1][1] - busy[0][0] if busy else 0.0,
        by_name={name: (launches[name], times[name]) for name in most},
    )


@contextmanager
def profiled(setting: Setting) -> Iterator[torch.profiler.profile]:
    """A profiler. On exit, all work queued within it has ended."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [] if setting.is_dry else [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        yield profile
        synchronize(setting.device)


def write_trace(profile: torch.profiler.profile, path: Path) -> list[Event]:
    """Writes the trace, and returns its events."""
    profile.export_chrome_trace(str(path))
    events: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def spans(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    """From a trace's events: when the kernels of steps ran, and when the kernel of hand-overs ran, in microseconds."""
    kernels: list[Span] = []
    moves: list[Span] = []
    for event in events:
        if event.get("cat") == "kernel":
            span = (float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0)))
            (moves if event.get("name") == COPY_KERNEL else kernels).append(span)
    return kernels, moves


def merged(spans: Iterable[Span]) -> list[Span]:
    """The time that these spans cover, as spans in order that do not overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def shared(a: list[Span], b: list[Span]) -> float:
    """How long both run at the same time. Both must be merged."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
