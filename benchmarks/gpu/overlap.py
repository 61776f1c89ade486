"""Decode steps while a hand-over's blocks arrive: how much of the copying the device does beside computing.

Writes a trace for a browser (chrome://tracing or Perfetto). The copies go through the CUDA driver on a stream of their
own, block by block, as the reader of the `cuda_ipc` transport does it.
"""

import gzip
import json
import threading
from collections.abc import Iterable
from typing import Any

import torch

from baton.config import SchedulerConfig
from baton.sampling import SamplingParams
from benchmarks.gpu.build import CheckedEngine, device_engine, fill_alike, load
from benchmarks.gpu.loop import LoopedEngine
from benchmarks.gpu.measure import make_recorder, synchronize
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting
from benchmarks.gpu.shapes import DRY, LLAMA_3_1_8B, write_config
from engine.step_limits import StepLimits

PART = "overlap"
PAUSE_S = 0.02
"""Between two hand-overs."""
Span = tuple[float, float]


def run(setting: Setting, emit: Emit) -> None:
    config = DRY["tiny"] if setting.is_dry else LLAMA_3_1_8B
    path = write_config(setting.folder / "overlap", config)
    model = load(setting, path, "float32" if setting.is_dry else "bfloat16", dummy=True)
    batch, context, num_tokens = (2, 20, 6) if setting.is_dry else (64, 2048, 40)
    block_size = 32 if setting.is_dry else 64
    blocks_each = -(-(context + num_tokens + 2) // block_size)
    num_loaded = 4 if setting.is_dry else 256
    num_blocks = 1 + batch * blocks_each + 2 * num_loaded
    limits = StepLimits(batch, batch, context + num_tokens + 2)
    engine = device_engine(
        setting, model, num_blocks, block_size, limits, make_recorder(setting.device), [batch]
    )
    scheduler = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=batch,
        max_model_len=context + num_tokens + 2,
        num_blocks=num_blocks - 2 * num_loaded,  # the others are the hand-over's
        block_size=block_size,
        enable_prefix_caching=False,
    )
    with LoopedEngine(engine.runner, scheduler, model.vocab_size) as loop:
        emit(_measure(setting, engine, loop, num_loaded, (batch, context, num_tokens)))


def _measure(
    setting: Setting, engine: CheckedEngine, loop: LoopedEngine, num_loaded: int, load: tuple[int, int, int]
) -> Row:
    batch, context, num_tokens = load
    prompts = [[(row + i) % engine.model.vocab_size for i in range(context)] for row in range(batch)]
    params = [SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)] * batch
    fill_alike(engine.pool)
    alone = loop.run(prompts, params, loaded=True)
    fill_alike(engine.pool)
    copies = BlockCopies(setting, engine, num_loaded)
    synchronize(setting.device)  # the copies' stream does not wait for what filled the blocks
    with torch.profiler.profile(activities=_activities(setting)) as profile:
        copies.start()
        beside = loop.run(prompts, params, loaded=True)
        copies.stop()
        synchronize(setting.device)
    wrong = [] if beside.tokens == alone.tokens else ["copies beside a step changed what it computes"]
    wrong += [] if copies.are_right() else ["a block arrived wrong"]
    is_kept = setting.is_dry or setting.out is not None
    folder = setting.out or setting.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "overlap.trace.json.gz"
    profile.export_chrome_trace(str(path))
    kernels, moves = spans(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    moving_us = sum(end - start for start, end in merged(moves))
    hidden_us = shared(merged(kernels), merged(moves))
    share = hidden_us / moving_us if moving_us else 0.0
    return Row(
        PART,
        f"decode, batch {batch}, context {context}, beside a hand-over",
        f"{share:.0%} of the copying beside kernels",
        f"step {1e3 * alone.full_step_s:.3f} ms alone, {1e3 * beside.full_step_s:.3f} ms beside; "
        f"{copies.num_copied} blocks copied; {path.name}, {path.stat().st_size / 2**20:.1f} MiB"
        + ("" if is_kept else ", not kept without --out")
        + "".join(f"; {text}" for text in wrong),
        is_failed=bool(wrong) or (not setting.is_dry and not moves),
        figures={
            "hidden_share": share,
            "alone_s": alone.full_step_s,
            "beside_s": beside.full_step_s,
            "blocks_copied": copies.num_copied,
            "copying_us": moving_us,
        },
    )


class BlockCopies:
    """Copies blocks at the pool's end to others there, round after round, on a thread and a stream of its own."""

    def __init__(self, setting: Setting, engine: CheckedEngine, num_blocks: int) -> None:
        blocks = engine.pool.blocks_NLKHTD
        self._sources, self._targets = blocks[-2 * num_blocks : -num_blocks], blocks[-num_blocks:]
        self._sources.normal_()
        self._stream = None if setting.is_dry else torch.cuda.Stream()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self.num_copied = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def are_right(self) -> bool:
        return torch.equal(self._sources, self._targets)

    def _run(self) -> None:
        while self.num_copied == 0 or not self._stop.wait(PAUSE_S):
            with torch.cuda.stream(self._stream):
                for source, target in zip(self._sources, self._targets, strict=True):
                    target.copy_(source, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
            self.num_copied += len(self._sources)


def spans(events: Iterable[dict[str, Any]]) -> tuple[list[Span], list[Span]]:
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


def _activities(setting: Setting) -> list[torch.profiler.ProfilerActivity]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    return kinds if setting.is_dry else [*kinds, torch.profiler.ProfilerActivity.CUDA]
