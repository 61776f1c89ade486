"""Measures decode steps: time compared with the bytes to move, time outside the graph, a trace, and each switch."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.config import SchedulerConfig
from baton.sampling import SamplingParams
from benchmarks.gpu.build import (
    CheckedEngine,
    Dtype,
    NotingRecorder,
    device_engine,
    fill_randomly,
    free_bytes,
    itemsize,
    load,
    torch_engine,
)
from benchmarks.gpu.decode_switches import Comparison, switch_rows
from benchmarks.gpu.loop import LoopedEngine
from benchmarks.gpu.measure import (
    MAX_ERROR,
    Ceilings,
    make_recorder,
    measure_ceilings,
    relative_error,
    seconds,
    synchronize,
)
from benchmarks.gpu.plans import PlanMaker
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from benchmarks.gpu.shapes import DRY, LARGE, ModelCosts, comparable, write_config
from benchmarks.gpu.trace import trace_work
from engine.batch import StepLimits
from engine.gpu.graphs import Replay
from engine.loading.loader import LoadedModel

PART = "decode"
SWITCHED_BATCH = 16
"""How many requests decode in a step for a switch that has no effect on a single request. The products for few rows
accept at most this many rows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The models and sizes that are measured."""

    models: dict[str, dict[str, Any]]
    dtype: Dtype
    max_error: float
    """Largest allowed error of the logits, relative to torch's logits on the same device and weights."""
    block_size: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    check_contexts: tuple[int, ...]
    """Contexts of the step that is compared with torch's."""
    num_tokens: int
    """How many decode steps the engine loop computes."""
    rounds: int
    reserve_bytes: int
    """Device memory that KV blocks leave free for everything else."""


FULL = Sizes(
    LARGE,
    "bfloat16",
    MAX_ERROR,
    64,
    (1, 16, 64, 256),
    (1024, 8192),
    (1, 63, 64, 65, 700, 3000),
    48,
    20,
    8 * 2**30,
)
TINY = Sizes(DRY, "float32", 1e-4, 32, (2,), (40, 2**16), (1, 40), 6, 1, 0)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_dry else FULL
    ceilings = measure_ceilings(setting, torch.float32 if setting.is_dry else torch.bfloat16)
    emit(ceilings_row(PART, ceilings))
    for name, config in setting.chosen(sizes.models).items():
        path = write_config(setting.folder / name, config)
        if setting.quantization == "auto":
            checked = write_config(setting.folder / f"{name}-checked", comparable(config))
            check = partial(_check_logits, setting, sizes, name, checked)
            guarded(emit, PART, f"{name}: logits beside torch's", check)
        model = load(setting, path, sizes.dtype, dummy=True, quantization=setting.quantization)
        title = setting.titled(name)
        guarded(emit, PART, title, partial(_measure_model, setting, sizes, title, model, ceilings))
        del model
        gc.collect()


def ceilings_row(part: str, ceilings: Ceilings) -> Row:
    return Row(
        part,
        "the device's ceilings",
        f"{ceilings.bytes_per_s / 1e12:.2f} TB/s, {ceilings.flops_per_s / 1e12:.0f} TFLOP/s",
        "a large copy, read + written; a large matrix product",
        figures={"copy_bytes_per_s": ceilings.bytes_per_s, "matmul_flops_per_s": ceilings.flops_per_s},
    )


def _check_logits(setting: Setting, sizes: Sizes, name: str, path: Path) -> Iterator[Row]:
    """Compares one recorded step of our kernels with torch's, over the same keys and values."""
    contexts = list(sizes.check_contexts)
    num_blocks = 2 + sum(-(-context // sizes.block_size) for context in contexts)
    model = load(setting, path, sizes.dtype, dummy=True)
    limits = StepLimits(len(contexts), len(contexts), max(contexts) + 1)
    ours = device_engine(
        setting, model, num_blocks, sizes.block_size, limits, make_recorder(setting.device), [len(contexts)]
    )
    torch_model = load(setting, path, sizes.dtype, dummy=True, torch_only=True)
    theirs = torch_engine(torch_model, num_blocks, sizes.block_size)
    fill_randomly(ours.pool)
    theirs.pool.blocks_NLKHTD.copy_(ours.pool.blocks_NLKHTD)
    logits = []
    for engine in (ours, theirs):
        engine.runner.execute(PlanMaker(num_blocks, sizes.block_size, model.vocab_size).step(contexts))
        synchronize(setting.device)
        assert engine.forward.logits_RV is not None
        logits.append(engine.forward.logits_RV.float())
    error = relative_error(logits[0], logits[1])
    agree = float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean())
    yield Row(
        PART,
        f"{name}: logits beside torch's",
        f"{error:.1e} off, {agree:.0%} same arg max",
        f"contexts {contexts}; at most {sizes.max_error:g}",
        is_failed=not error <= sizes.max_error,
        figures={"relative_error": error, "argmax_agreement": agree},
    )


def _measure_model(
    setting: Setting, sizes: Sizes, name: str, model: LoadedModel, ceilings: Ceilings
) -> Iterator[Row]:
    cases, num_blocks = fitting_cases(setting, sizes, model)
    for batch, context in _all_cases(sizes):
        if (batch, context) not in cases:
            gib = batch * _blocks_each(sizes, context) * _block_bytes(sizes, model) / 2**30
            yield Row(PART, _title(name, batch, context), "skipped", f"{gib:.0f} GiB of KV do not fit")
    recorder = NotingRecorder(make_recorder(setting.device))
    batches = sorted({batch for batch, _ in cases})
    limits = StepLimits(
        max(batches), max(batches), max(context for _, context in cases) + sizes.num_tokens + 2
    )
    engine = device_engine(setting, model, num_blocks, sizes.block_size, limits, recorder, batches)
    fill_randomly(engine.pool)
    for batch, context in cases:
        yield _measure_case(setting, sizes, name, engine, recorder, (batch, context), ceilings)
        if context == sizes.contexts[0]:
            with _replayed(sizes, engine, recorder, (batch, context)) as replay:
                yield trace_work(setting, PART, _title(name, batch, context), replay)
    batch, context = min(SWITCHED_BATCH, max(batches)), sizes.contexts[0]
    # A switch changes roundings, and of nearly equal experts a rounding decides which one is chosen.
    max_error = math.inf if any(model.architecture.mixtures) else sizes.max_error
    comparison = Comparison(model, engine.pool, context, batch, sizes.rounds, max_error)
    yield from switch_rows(setting, PART, f"{name}, context {context}", comparison)


@contextmanager
def _replayed(
    sizes: Sizes, engine: CheckedEngine, recorder: NotingRecorder, case: tuple[int, int]
) -> Iterator[Replay]:
    """A function that computes the same step of these requests again, and nothing else."""
    batch, context = case
    plans = PlanMaker(engine.pool.num_blocks, sizes.block_size, engine.model.vocab_size)
    engine.runner.execute(plans.step([context] * batch))
    assert recorder.last is not None, "the step was not replayed"
    yield recorder.last
    engine.runner.execute(plans.step([]))  # the runner forgets the requests


def _measure_case(
    setting: Setting,
    sizes: Sizes,
    name: str,
    engine: CheckedEngine,
    recorder: NotingRecorder,
    case: tuple[int, int],
    ceilings: Ceilings,
) -> Row:
    batch, context = case
    with _replayed(sizes, engine, recorder, case) as replay:
        graph_s = seconds(setting.device, replay, sizes.rounds)
    step_s = _loop_step_s(sizes, engine, batch, context)
    costs, size = ModelCosts.of(engine.model.architecture), itemsize(sizes.dtype)
    layer_size = size if setting.quantization == "auto" else 1
    floor_s = costs.decode_bytes(batch, context, layer_size, size, size) / ceilings.bytes_per_s
    outside = max(0.0, step_s - graph_s) / step_s
    return Row(
        PART,
        _title(name, batch, context),
        f"{batch / step_s:,.0f} tokens/s, {floor_s / step_s:.0%} of floor",
        f"step {1e3 * step_s:.3f} ms, graph {1e3 * graph_s:.3f}, floor {1e3 * floor_s:.3f}; "
        f"outside the graph {outside:.1%} (goal < 5 %)",
        figures={
            "batch": batch,
            "context": context,
            "tokens_per_s": batch / step_s,
            "step_s": step_s,
            "graph_s": graph_s,
            "floor_s": floor_s,
            "floor_share_of_step": floor_s / step_s,
            "floor_share_of_graph": floor_s / graph_s,
            "outside_share": outside,
        },
    )


def _loop_step_s(sizes: Sizes, engine: CheckedEngine, batch: int, context: int) -> float:
    """Seconds for a step of the asynchronous engine loop with the real scheduler. All requests decode."""
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=batch,
        max_model_len=context + sizes.num_tokens + 2,
        num_blocks=engine.pool.num_blocks,
        block_size=sizes.block_size,
        enable_prefix_caching=False,
    )
    vocab_size = engine.model.vocab_size
    prompts = [[(31 * row + 7 * i) % vocab_size for i in range(context)] for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=sizes.num_tokens, ignore_eos=True)
    with LoopedEngine(engine.runner, config, vocab_size) as loop:
        return loop.run(prompts, [params] * batch, loaded=True).full_step_s


def fitting_cases(setting: Setting, sizes: Sizes, model: LoadedModel) -> tuple[list[tuple[int, int]], int]:
    """The cases whose KV fits in the device's memory beside the model, and the blocks of the largest case."""
    room = (free_bytes(setting) - sizes.reserve_bytes) // _block_bytes(sizes, model)
    needs = {case: case[0] * _blocks_each(sizes, case[1]) + 1 for case in _all_cases(sizes)}
    cases = [case for case, need in needs.items() if need <= room]
    assert cases, f"{room} blocks hold none of {needs}"
    return cases, max(needs[case] for case in cases)


def _all_cases(sizes: Sizes) -> list[tuple[int, int]]:
    return [(batch, context) for context in sizes.contexts for batch in sizes.batches]


def _blocks_each(sizes: Sizes, context: int) -> int:
    return -(-(context + sizes.num_tokens + 2) // sizes.block_size)


def _block_bytes(sizes: Sizes, model: LoadedModel) -> int:
    return model.kv_block_shape(sizes.block_size).size_bytes


def _title(name: str, batch: int, context: int) -> str:
    return f"{name}: batch {batch}, context {context}"
