"""Prefill compared with the speed of the matrix units, by chunk size."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.build import (
    CheckedEngine,
    Dtype,
    device_engine,
    load,
    torch_engine,
)
from benchmarks.gpu.decode import ceilings_row
from benchmarks.gpu.measure import (
    MAX_ERROR,
    Ceilings,
    make_recorder,
    measure_ceilings,
    relative_error,
    synchronize,
    wall_seconds,
)
from benchmarks.gpu.plans import PlanMaker
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from benchmarks.gpu.shapes import DRY, LARGE, ModelCosts, comparable, write_config
from benchmarks.gpu.trace import NUM_TRACED, trace_work
from engine.batch import StepLimits

PART = "prefill"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The models and sizes that are measured."""

    models: dict[str, dict[str, Any]]
    dtype: Dtype
    max_error: float
    block_size: int
    prompts: tuple[int, ...]
    chunks: tuple[int, ...]
    """Chunk sizes: tokens of one step. A prompt of `chunked_prompt` tokens is divided into such chunks."""
    chunked_prompt: int
    check_prompt: int
    rounds: int


FULL = Sizes(LARGE, "bfloat16", MAX_ERROR, 64, (512, 2048, 8192), (512, 1024, 2048, 4096, 8192), 8192, 700, 8)
TINY = Sizes(DRY, "float32", 1e-4, 32, (3,), (3,), 5, 4, 1)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_dry else FULL
    ceilings = measure_ceilings(setting, torch.float32 if setting.is_dry else torch.bfloat16)
    emit(ceilings_row(PART, ceilings))
    for name, config in setting.chosen(sizes.models).items():
        if setting.quantization == "auto":
            checked = write_config(setting.folder / f"{name}-checked", comparable(config))
            check = partial(_check_logits, setting, sizes, name, checked)
            guarded(emit, PART, f"{name}: logits beside torch's", check)
            gc.collect()
        path, title = write_config(setting.folder / name, config), setting.titled(name)
        prompts = _our_prompts(setting, sizes, path)
        guarded(emit, PART, title, partial(_measure_model, setting, sizes, title, prompts, ceilings))
        del prompts
        gc.collect()


def _our_prompts(setting: Setting, sizes: Sizes, path: Path) -> "_Prompts":
    """Computes with our kernels, and with graphs for those sizes for which a worker records them."""
    model = load(setting, path, sizes.dtype, dummy=True, quantization=setting.quantization)
    longest = _longest(sizes)
    engine = device_engine(
        setting,
        model,
        _num_blocks(sizes),
        sizes.block_size,
        StepLimits(2, longest, longest + 1),
        make_recorder(setting.device),
        prompt_sizes=sorted({*sizes.prompts, *sizes.chunks}),
    )
    return _Prompts(sizes, engine)


def _longest(sizes: Sizes) -> int:
    return max(*sizes.prompts, sizes.chunked_prompt, sizes.check_prompt)


def _num_blocks(sizes: Sizes) -> int:
    return 2 + -(-_longest(sizes) // sizes.block_size)


def _check_logits(setting: Setting, sizes: Sizes, name: str, path: Path) -> Iterator[Row]:
    """Compares a whole prompt: our kernels compute it in two chunks, torch's in one."""
    ours = _our_prompts(setting, sizes, path)
    model = load(setting, path, sizes.dtype, dummy=True, torch_only=True)
    theirs = _Prompts(sizes, torch_engine(model, _num_blocks(sizes), sizes.block_size))
    logits = []
    for prompts, chunk in ((ours, sizes.check_prompt // 2 + 1), (theirs, sizes.check_prompt)):
        prompts.prepared(sizes.check_prompt, chunk, 1)()
        synchronize(setting.device)
        assert prompts.engine.forward.logits_RV is not None
        logits.append(prompts.engine.forward.logits_RV.float())
    error = relative_error(logits[0], logits[1])
    yield Row(
        PART,
        f"{name}: logits beside torch's",
        f"{error:.1e} off",
        f"{sizes.check_prompt} tokens in two chunks; at most {sizes.max_error:g}",
        is_failed=not error <= sizes.max_error,
        figures={"relative_error": error},
    )


def _measure_model(
    setting: Setting, sizes: Sizes, name: str, prompts: "_Prompts", ceilings: Ceilings
) -> Iterator[Row]:
    costs = ModelCosts.of(prompts.engine.model.architecture)
    for length in sizes.prompts:
        wall_s = wall_seconds(
            setting.device, prompts.prepared(length, length, sizes.rounds + 1), sizes.rounds
        )
        flops = costs.prefill_flops(length)
        utilization = flops / wall_s / ceilings.flops_per_s
        yield Row(
            PART,
            f"{name}: prompt of {length}",
            f"{length / wall_s:,.0f} tokens/s, {utilization:.0%} of matmul",
            f"{1e3 * wall_s:.2f} ms from plan to token",
            figures={"tokens": length, "wall_s": wall_s, "model_flops_utilization": utilization},
        )
        traced = prompts.prepared(length, length, NUM_TRACED)
        yield trace_work(setting, PART, f"{name}: prompt of {length}", traced)
    for chunk in sizes.chunks:
        wall_s = wall_seconds(
            setting.device, prompts.prepared(sizes.chunked_prompt, chunk, sizes.rounds + 1), sizes.rounds
        )
        yield Row(
            PART,
            f"{name}: {sizes.chunked_prompt} in chunks of {chunk}",
            f"{sizes.chunked_prompt / wall_s:,.0f} tokens/s",
            f"a step {1e3 * wall_s * chunk / sizes.chunked_prompt:.2f} ms, which decodes beside it wait for",
            figures={"chunk": chunk, "tokens": sizes.chunked_prompt, "wall_s": wall_s},
        )


class _Prompts:
    """Computes prompts of any length. Each prompt is a new request over the same blocks."""

    def __init__(self, sizes: Sizes, engine: CheckedEngine) -> None:
        self.engine = engine
        self._plans = PlanMaker(engine.pool.num_blocks, sizes.block_size, engine.model.vocab_size)

    def prepared(self, length: int, chunk: int, count: int) -> Callable[[], None]:
        """A function that computes a prompt in chunks, until the next token is known. Call it `count` times.

        The plans are made here, since the scheduler's time is not part of the prefill.
        """
        waiting = [list(self._plans.prompt(length, chunk)) for _ in range(count)]

        def compute() -> None:
            for plan in waiting.pop(0):
                self.engine.runner.execute(plan)

        return compute
