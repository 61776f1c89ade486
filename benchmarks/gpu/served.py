"""`baton serve` on a Ray cluster, as a user starts it: its answers beside the CPU engine's, and killed workers.

Ray gives each worker a GPU of its own. On a machine with fewer GPUs than workers, Ray is told of more GPUs than
there are, and does not hide any GPU from a worker. So the workers share a GPU.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray  # noqa: F401  # without Ray, this part is left out
import torch

from baton.config import ModelConfig, SchedulerConfig
from baton.sampling import SamplingParams
from benchmarks.gpu.build import torch_engine
from benchmarks.gpu.loop import LoopedEngine
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import load_model
from engine.loading.pretrained import default_cache_dir, is_cached, resolve
from gateway import GatewayClient, Tokenizer
from tests.chaos.fleet import until_healed
from tests.factories.foreign_ray import RAY_ENVIRONMENT, foreign_ray
from tests.factories.models import make_model_dir
from tests.factories.serving import serving

PART = "served"
MODEL = "smollm2"
ROOT = Path(__file__).parents[2]
TEXT = ROOT / "docs" / "architecture.md"
NUM_PREFILL, NUM_DECODE = 1, 2
NUM_WORKERS = NUM_PREFILL + NUM_DECODE
KILL_AFTER_TOKENS = 8
"""A worker is killed when every stream has sent so many tokens."""
SHARED_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
CONFIG = {"gateway": {"placement_timeout_s": 300.0}}

Answers = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload. Each prompt is a piece of the same text."""

    lengths: tuple[int, ...]
    num_tokens: int
    num_blocks: int
    block_size: int


FULL = Sizes((5, 17, 63, 64, 65, 130, 300, 600, 900) * 3, 64, 1024, 64)
TINY = Sizes((3, 20), 40, 64, 16)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a fleet stores and multiplies numbers."""

    name: str
    flags: tuple[str, ...]
    least_alike: float
    """The share of first tokens that must equal float32's. Rounding changes a token if two logits are nearly equal."""


EXACT = Numbers("float32", ("--dtype", "float32", "--quantization", "none"), 1.0)
ROUNDED = (
    Numbers("bfloat16", ("--dtype", "bfloat16", "--quantization", "none"), 0.85),
    Numbers("fp8", ("--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8"), 0.7),
)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_dry else FULL
    path = _model(setting)
    prompts = _prompts(path, sizes)
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder, ExitStack() as stack:
        num_devices = 0 if setting.is_dry else torch.cuda.device_count()
        shared = SHARED_DEVICES if num_devices < NUM_WORKERS else {}
        num_devices = 0 if setting.is_dry else max(num_devices, NUM_WORKERS)
        address = stack.enter_context(foreign_ray(NUM_WORKERS + 1, Path(folder), num_devices, shared))
        config = Path(folder) / "served.yaml"
        config.write_text(json.dumps(CONFIG))  # JSON is YAML
        flags = [str(config), "--ray-address", address, *_flags(setting, sizes, path)]
        expected: Answers = []
        for numbers in (EXACT, *ROUNDED):
            work = partial(_serve, [*flags, *numbers.flags], sizes, path, prompts, expected, numbers)
            guarded(emit, PART, numbers.name, work)


def _model(setting: Setting) -> Path:
    """The real small model if it is in the cache, else a random one."""
    cache = default_cache_dir(os.environ)
    if not setting.is_dry and is_cached(MODEL, cache):
        return resolve(MODEL, cache)
    return make_model_dir(setting.folder / "served-model", "llama", head_dim=64)


def _prompts(path: Path, sizes: Sizes) -> list[tuple[int, ...]]:
    tokens = Tokenizer(path).encode(TEXT.read_text(), add_special_tokens=False)
    begins = range(0, 101 * len(sizes.lengths), 101)
    return [tokens[begin : begin + length] for begin, length in zip(begins, sizes.lengths, strict=True)]


def _flags(setting: Setting, sizes: Sizes, path: Path) -> list[str]:
    flags = {
        "--model": path,
        "--device": setting.device.type,
        "--prefill": NUM_PREFILL,
        "--decode": NUM_DECODE,
        "--block-size": sizes.block_size,
        "--num-blocks": sizes.num_blocks,
        "--max-model-len": 1024,
    }
    return [str(part) for flag in flags.items() for part in flag]


def _serve(
    flags: Sequence[str],
    sizes: Sizes,
    path: Path,
    prompts: Sequence[tuple[int, ...]],
    expected: Answers,
    numbers: Numbers,
) -> Iterator[Row]:
    """Starts the fleet and asks. The first fleet also loses workers; it fills `expected` while it starts."""
    with serving(*flags, environment=RAY_ENVIRONMENT) as serve:
        is_first = not expected
        if is_first:
            expected += _computed_on_cpu(path, sizes, prompts)
        target = serve.wait_ready()["target"]
        yield from _rows(numbers, asyncio.run(_ask_all(target, prompts, sizes, None)), expected, "")
        for role in ("decode", "prefill") if is_first else ():
            answers = asyncio.run(_ask_all(target, prompts, sizes, role))
            yield from _rows(numbers, answers, expected, f", a {role} worker killed")
        serve.interrupt()
        code = serve.wait_gone()
        if code != 0:
            yield Row(PART, numbers.name, f"ended with {code}", serve.stderr[-300:], is_failed=True)


def _computed_on_cpu(path: Path, sizes: Sizes, prompts: Sequence[tuple[int, ...]]) -> Answers:
    """The simplest engine's tokens: PyTorch's kernels, float32."""
    model = load_model(
        ModelConfig(dtype="float32", quantization="none"), path, torch.device("cpu"), TorchBackend()
    )
    config = SchedulerConfig(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=512,
        max_model_len=1024,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    params = SamplingParams(max_tokens=sizes.num_tokens, ignore_eos=True, temperature=0.0)
    with LoopedEngine(
        torch_engine(model, sizes.num_blocks, sizes.block_size).runner, config, model.vocab_size
    ) as loop:
        return list(map(tuple, loop.run(prompts, [params] * len(prompts)).tokens))


async def _ask_all(
    target: str, prompts: Sequence[tuple[int, ...]], sizes: Sizes, victim: str | None
) -> Answers:
    """All prompts at once. A worker of the role `victim` is killed meanwhile, and the fleet is whole at the end."""
    async with GatewayClient(target) as client:
        begun = asyncio.Semaphore(0)
        asking = [asyncio.create_task(_ask(client, prompt, sizes, begun.release)) for prompt in prompts]
        if victim is not None:
            for _ in prompts:
                await begun.acquire()
            workers = (await client.describe())["workers"]
            os.kill(next(worker["pid"] for worker in workers if worker["role"] == victim), signal.SIGKILL)
        answers = await asyncio.gather(*asking)
        _, missing = await until_healed(client, NUM_WORKERS)
        assert not missing, missing
        return answers


async def _ask(
    client: GatewayClient, prompt: tuple[int, ...], sizes: Sizes, on_begun: Callable[[], None]
) -> tuple[int, ...]:
    sampling: dict[str, Any] = {"max_tokens": sizes.num_tokens, "ignore_eos": True, "temperature": 0.0}
    tokens: list[int] = []
    async for event in client.generate(token_ids=prompt, sampling=sampling, mode="disaggregated"):
        is_first_part = len(tokens) < KILL_AFTER_TOKENS
        tokens += event.token_ids
        if is_first_part and len(tokens) >= KILL_AFTER_TOKENS:
            on_begun()
    return tuple(tokens)


def _rows(numbers: Numbers, answers: Answers, expected: Answers, what: str) -> Iterator[Row]:
    num_alike = sum(map(tuple.__eq__, answers, expected))
    num_first_alike = sum(ours[:1] == theirs[:1] for ours, theirs in zip(answers, expected, strict=True))
    is_complete = [len(ours) for ours in answers] == [len(theirs) for theirs in expected]
    share = (num_alike if numbers is EXACT else num_first_alike) / len(expected)
    yield Row(
        PART,
        numbers.name + what,
        f"{num_alike} of {len(expected)} answers as on the CPU",
        f"first tokens: {num_first_alike}" + ("" if is_complete else "; answers of wrong lengths"),
        is_failed=share < numbers.least_alike or not is_complete,
        figures={"equal": num_alike, "first_equal": num_first_alike, "requests": len(expected)},
    )
