"""Whether the GPU engine computes the tokens of the CPU engine: float32, the real scheduler, mixed steps."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from baton.config import ModelConfig, SchedulerConfig
from baton.sampling import SamplingParams
from benchmarks.gpu.build import device_parts, load, torch_engine
from benchmarks.gpu.loop import LoopedEngine
from benchmarks.gpu.measure import make_recorder
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from engine.batch import StepLimits
from engine.gpu.graphs import decode_sizes
from engine.kv_cache import KVPool
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import LoadedModel, load_model
from engine.runner import ModelRunner
from tests.factories.models import make_model_dir

PART = "tokens"
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sizes:
    """A small model, the workload, and small pools."""

    name: str
    options: dict[str, Any]
    block_size: int
    lengths: tuple[int, ...]
    max_tokens: int
    max_num_seqs: int
    chunk: int
    scarce_tokens: int
    """Tokens in a pool with too few blocks for all requests, so that some requests are preempted."""


def _full(name: str, block_size: int, **options: Any) -> Sizes:
    lengths = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 255, 257, 300, 400, 500)
    return Sizes(name, options, block_size, lengths, 40, 16, 256, 1200)


def _tiny(name: str, **options: Any) -> Sizes:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    dims = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    return Sizes(name, {**heads, **dims, **options}, 2, (1, 3), 3, 2, 4, 8)


FULL = (
    _full("llama", 32, hidden_size=128, num_hidden_layers=4),
    _full("qwen3", 64, hidden_size=128, head_dim=128),
    _full("mistral", 16, hidden_size=256, sliding_window=48),
    _full("mixtral", 32, hidden_size=128, num_local_experts=6),
)
TINY = (
    _tiny("llama"),
    _tiny("qwen3"),
    _tiny("mistral", sliding_window=2),
    _tiny("mixtral", num_local_experts=3),
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the same tokens."""

    name: str
    is_async: bool = True
    has_graphs: bool = True
    preemption: Literal["recompute", "swap"] | None = None
    """How requests are preempted. None: the pool has enough blocks for all requests."""


WAYS = (
    Way("as served: asynchronous, graphs"),
    Way("synchronous", is_async=False),
    Way("without graphs", has_graphs=False),
    Way("blocks for few, recomputed", preemption="recompute"),
    Way("blocks for few, swapped", preemption="swap"),
)


def run(setting: Setting, emit: Emit) -> None:
    for sizes in TINY if setting.is_dry else FULL:
        path = make_model_dir(setting.folder / f"tokens-{sizes.name}", sizes.name, **sizes.options)
        ways = WAYS if sizes.name == "llama" or not setting.is_dry else WAYS[:1]
        for way in ways:
            guarded(emit, PART, f"{sizes.name}: {way.name}", partial(_check, setting, sizes, path, way))


def _check(setting: Setting, sizes: Sizes, path: Path, way: Way) -> Iterator[Row]:
    """Compares one way on the device with the simplest way on the CPU."""
    reference = load_model(ModelConfig(dtype="float32"), path, CPU, TorchBackend())
    prompts, params = _workload(sizes, reference.vocab_size)
    num_blocks = _ample_blocks(sizes)
    on_cpu = torch_engine(reference, num_blocks, sizes.block_size).runner
    want, _ = _generate(sizes, on_cpu, num_blocks, prompts, params, Way("on CPU", is_async=False))
    model = load(setting, path, "float32", dummy=False)
    if way.preemption is not None:
        num_blocks = 1 + sizes.scarce_tokens // sizes.block_size
    runner = _device_runner(setting, sizes, model, num_blocks, way)
    got, num_preempted = _generate(sizes, runner, num_blocks, prompts, params, way)
    wrong = [index for index, tokens in enumerate(got) if tokens != want[index]]
    yield Row(
        PART,
        f"{sizes.name}: {way.name}",
        f"{len(want) - len(wrong)} of {len(want)} requests equal",
        f"{sum(map(len, want))} tokens, {num_preempted} preemptions"
        + (f"; differing: {wrong}" if wrong else ""),
        is_failed=bool(wrong) or (way.preemption is not None and num_preempted == 0),
        figures={"equal": len(want) - len(wrong), "requests": len(want), "preemptions": num_preempted},
    )


def _device_runner(
    setting: Setting, sizes: Sizes, model: LoadedModel, num_blocks: int, way: Way
) -> ModelRunner:
    pool = KVPool(num_blocks, model.kv_block_shape(sizes.block_size), setting.device)
    limits = StepLimits(sizes.max_num_seqs, sizes.chunk, _max_model_len(sizes))
    recorder = make_recorder(setting.device) if way.has_graphs else None
    parts = device_parts(setting, model, pool, limits, recorder, decode_sizes(sizes.max_num_seqs))
    return parts.runner(pool, _num_swap_blocks(sizes, way) or 0)


def _num_swap_blocks(sizes: Sizes, way: Way) -> int | None:
    return _ample_blocks(sizes) if way.preemption == "swap" else None


def _generate(
    sizes: Sizes,
    runner: ModelRunner,
    num_blocks: int,
    prompts: list[list[int]],
    params: list[SamplingParams],
    way: Way,
) -> tuple[list[list[int]], int]:
    """Runs the workload, and returns its tokens and the number of preemptions."""
    config = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.chunk,
        max_model_len=_max_model_len(sizes),
        num_blocks=num_blocks,
        num_swap_blocks=_num_swap_blocks(sizes, way),
        preemption=way.preemption or "recompute",
        block_size=sizes.block_size,
        enable_prefix_caching=False,
        async_scheduling=way.is_async,
    )
    with LoopedEngine(runner, config, 1_000) as loop:
        tokens = loop.run(prompts, params).tokens
        return tokens, loop.counters.get("preemptions", 0)


def _workload(sizes: Sizes, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """The workload: every other request is greedy, and some of these have a penalty. The others have seeds, and most
    of them filters.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in sizes.lengths]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 3},
    ]
    params = [
        SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True, **kinds[index % len(kinds)])
        for index in range(len(prompts))
    ]
    return prompts, params


def _max_model_len(sizes: Sizes) -> int:
    return max(sizes.lengths) + sizes.max_tokens + 1


def _ample_blocks(sizes: Sizes) -> int:
    return 2 + len(sizes.lengths) * -(-_max_model_len(sizes) // sizes.block_size)
