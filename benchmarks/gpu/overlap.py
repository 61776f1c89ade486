"""Decode steps while the blocks of a hand-over arrive: how much the device copies and computes at once.

Writes a trace for a browser (chrome://tracing or Perfetto). As in the reader of the `cuda_ipc` transport, one kernel
copies all blocks, on a stream of its own.
"""

import threading
from collections.abc import Callable

import numpy as np
import torch

from baton.config import SchedulerConfig
from baton.sampling import SamplingParams
from benchmarks.gpu.build import CheckedEngine, device_engine, fill_alike, load
from benchmarks.gpu.loop import LoopedEngine
from benchmarks.gpu.measure import make_recorder, synchronize
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting
from benchmarks.gpu.shapes import DRY, LLAMA_3_1_8B, write_config
from benchmarks.gpu.trace import merged, profiled, shared, spans, write_trace
from engine.batch import StepLimits
from kv_transfer.cuda.copy_kernel import CopyKernel
from kv_transfer.cuda.driver import CudaDriver
from kv_transfer.transport.base import Runs

PART = "overlap"
PAUSE_S = 0.02
"""Pause between two hand-overs."""


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
        num_blocks=num_blocks - 2 * num_loaded,  # the others are for the hand-over
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
    synchronize(setting.device)  # the copies' stream does not wait for the work that filled the blocks
    with profiled(setting) as profile:
        copies.start()
        overlapped = loop.run(prompts, params, loaded=True)
        copies.stop()
    wrong = [] if overlapped.tokens == alone.tokens else ["copies beside a step changed what it computes"]
    wrong += [] if copies.are_right() else ["a block arrived wrong"]
    is_kept = setting.is_dry or setting.out is not None
    path = setting.folder_for_files() / "overlap.trace.json.gz"
    kernels, moves = spans(write_trace(profile, path))
    moving_us = sum(end - start for start, end in merged(moves))
    hidden_us = shared(merged(kernels), merged(moves))
    share = hidden_us / moving_us if moving_us else 0.0
    return Row(
        PART,
        f"decode, batch {batch}, context {context}, beside a hand-over",
        f"{share:.0%} of the copying beside kernels",
        f"step {1e3 * alone.full_step_s:.3f} ms alone, {1e3 * overlapped.full_step_s:.3f} ms beside; "
        f"{copies.num_copied} blocks copied; {path.name}, {path.stat().st_size / 2**20:.1f} MiB"
        + ("" if is_kept else ", not kept without --out")
        + "".join(f"; {text}" for text in wrong),
        is_failed=bool(wrong) or (not setting.is_dry and not moves),
        figures={
            "hidden_share": share,
            "alone_s": alone.full_step_s,
            "beside_s": overlapped.full_step_s,
            "blocks_copied": copies.num_copied,
            "copying_us": moving_us,
        },
    )


class BlockCopies:
    """Copies blocks at the end of the pool to other blocks there, in rounds, on its own thread and stream."""

    def __init__(self, setting: Setting, engine: CheckedEngine, num_blocks: int) -> None:
        blocks = engine.pool.blocks_NLKHTD
        self._sources, self._targets = blocks[-2 * num_blocks : -num_blocks], blocks[-num_blocks:]
        self._sources.normal_()
        self._copy = self._copy_on_host if setting.is_dry else self._make_copy()
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
            self._copy()
            self.num_copied += len(self._sources)

    def _copy_on_host(self) -> None:
        self._targets.copy_(self._sources)

    def _make_copy(self) -> Callable[[], None]:
        driver = CudaDriver(self._sources.device.index or 0)
        kernel, stream = CopyKernel(driver), driver.make_stream()  # both live as long as this process
        num_blocks, block_nbytes = len(self._sources), self._sources[0].nbytes
        offsets = np.arange(num_blocks) * block_nbytes
        runs = Runs(offsets, offsets, np.full(num_blocks, block_nbytes))

        def copy() -> None:
            kernel.queue(runs, self._sources.data_ptr(), self._targets.data_ptr(), stream)
            driver.wait(stream)

        return copy
