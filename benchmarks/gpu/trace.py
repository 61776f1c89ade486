"""Traces of PyTorch's profiler: written for a browser (chrome://tracing or Perfetto), and summed up here."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import synchronize
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting
from engine.gpu.graphs import Replay

NUM_WARM = 3
NUM_SHOWN = 8
"""Kernels that are named, of those that take the most time."""
Event = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class KernelSums:
    """Of some work's launches on one stream; microseconds."""

    num_launches: int
    kernels_us: float
    """Of all kernels, added up."""
    gaps_us: float
    """From the first kernel's start to the last one's end, without the times in which any ran."""
    span_us: float
    by_name: dict[str, tuple[int, float]]
    """Launches and time of those that take the most."""


@torch.inference_mode()
def trace_replay(setting: Setting, part: str, title: str, replay: Replay) -> Row:
    """One replay of a recorded step: its trace, and how long its kernels and the gaps between them are."""
    for _ in range(NUM_WARM):
        replay()
    synchronize(setting.device)
    with profiled(setting) as profile:
        replay()
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
    """Of a trace's events."""
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
    """All that is queued within has ended when it is left."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [] if setting.is_dry else [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        yield profile
        synchronize(setting.device)


def write_trace(profile: torch.profiler.profile, path: Path) -> list[Event]:
    """Its events."""
    profile.export_chrome_trace(str(path))
    events: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def spans(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    """When kernels ran and when memory was copied on the device, of a trace's events; in microseconds."""
    kernels, moves = [], []
    for event in events:
        span = (float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0)))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy" and "DtoD" in event.get("name", ""):
            moves.append(span)
    return kernels, moves


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def shared(a: list[Span], b: list[Span]) -> float:
    """How long both go on at once; each merged."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
