"""`baton serve` on a Ray cluster, as a user starts it: its answers compared with the CPU engine's, and killed workers.

Ray gives each worker a GPU of its own. On a machine with fewer GPUs than workers, Ray is told of more GPUs than
there are, and does not hide any GPU from a worker. So the workers share a GPU.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
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
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
NUM_PREFILL, NUM_DECODE = 1, 2
NUM_WORKERS = NUM_PREFILL + NUM_DECODE
SHARED_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
CONFIG = {"gateway": {"placement_timeout_s": 300.0}}

Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload. Each prompt is a piece of the same text."""

    lengths: tuple[int, ...]
    num_tokens: int
    num_blocks: int
    block_size: int


FULL = Sizes((5, 17, 63, 64, 65, 130, 300, 600, 900) * 3, 64, 1024, 64)
TINY = Sizes((3, 20, 600), 400, 128, 16)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a fleet stores and multiplies numbers."""

    name: str
    flags: tuple[str, ...]
    least_equal: float
    """The share of answers that must equal the CPU's. Rounding changes a token if two logits are nearly equal."""
    least_equal_first: float
    """The share of first tokens that must equal the CPU's."""


EXACT = Numbers("float32", ("--dtype", "float32", "--quantization", "none"), 1.0, 1.0)
ROUNDED: tuple[Numbers, ...] = (
    Numbers("bfloat16", ("--dtype", "bfloat16", "--quantization", "none"), 0.0, 0.85),
    Numbers("fp8", ("--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8"), 0.0, 0.7),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's tokens, and how many workers it was placed on, one after the other."""

    tokens: tuple[int, ...]
    num_attempts: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What every fleet is asked, and the tokens that the CPU engine computed."""

    sizes: Sizes
    prompts: Prompts
    expected: list[tuple[int, ...]]


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_dry else FULL
    path = _trained_model(setting)
    rounded = ROUNDED
    if path is None:  # rounding changes any token of a random model
        path = make_model_dir(setting.folder / "served-model", "llama", head_dim=64)
        rounded = tuple(replace(numbers, least_equal_first=0.0) for numbers in ROUNDED)
    prompts = _prompts(path, sizes)
    workload = Workload(sizes, prompts, _computed_on_cpu(path, sizes, prompts))
    num_devices = 0 if setting.is_dry else torch.cuda.device_count()
    num_told = 0 if setting.is_dry else max(num_devices, NUM_WORKERS)
    environment = SHARED_DEVICES if num_devices < NUM_WORKERS else {}
    with (
        tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder,
        foreign_ray(NUM_WORKERS + 1, Path(folder), num_told, environment) as address,
    ):
        config = Path(folder) / "served.yaml"
        config.write_text(json.dumps(CONFIG))  # JSON is YAML
        flags = [str(config), "--ray-address", address, *_flags(setting, sizes, path)]
        for numbers in (EXACT, *rounded):
            victims = ("decode", "prefill") if numbers is EXACT else ()
            work = partial(_serve, [*flags, *numbers.flags], workload, numbers, victims)
            guarded(emit, PART, numbers.name, work)


def _trained_model(setting: Setting) -> Path | None:
    """The real small model, if it is in the cache."""
    cache = default_cache_dir(os.environ)
    return resolve(MODEL, cache) if not setting.is_dry and is_cached(MODEL, cache) else None


def _prompts(path: Path, sizes: Sizes) -> Prompts:
    tokens = Tokenizer(path).encode(TEXT.read_text(), add_special_tokens=False)
    step = (len(tokens) - max(sizes.lengths)) // len(sizes.lengths)
    assert step > 0, f"{TEXT} is too short"
    return [tokens[step * index :][:length] for index, length in enumerate(sizes.lengths)]


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


def _computed_on_cpu(path: Path, sizes: Sizes, prompts: Prompts) -> list[tuple[int, ...]]:
    """The tokens of the simplest engine: PyTorch's kernels, float32."""
    exact = ModelConfig(dtype="float32", quantization="none")
    model = load_model(exact, path, torch.device("cpu"), TorchBackend())
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
    runner = torch_engine(model, sizes.num_blocks, sizes.block_size).runner
    with LoopedEngine(runner, config, model.vocab_size) as loop:
        return list(map(tuple, loop.run(prompts, [params] * len(prompts)).tokens))


def _serve(
    flags: Sequence[str], workload: Workload, numbers: Numbers, victims: Sequence[str]
) -> Iterator[Row]:
    """Starts a fleet and sends it all requests. For each role in `victims`, sends them again, and meanwhile
    kills a worker of this role."""
    with serving(*flags, environment=RAY_ENVIRONMENT) as serve:
        target = serve.wait_ready()["target"]
        for victim in (None, *victims):
            answers = asyncio.run(_ask_all(target, workload, victim))
            yield _row(numbers, workload, answers, victim)
        serve.interrupt()
        code = serve.wait_gone()
        if code != 0:
            yield Row(PART, numbers.name, f"ended with {code}", serve.stderr[-300:], is_failed=True)


async def _ask_all(target: str, workload: Workload, victim: str | None) -> list[Answer]:
    """Sends all requests at once.

    The victim is killed when the first request has a token, while other requests are still in prefill. When the
    function returns, the killed worker has been replaced.
    """
    async with GatewayClient(target) as client:
        has_begun = asyncio.Event()
        asks = (
            _ask(client, prompt, workload.sizes, str(victim), has_begun.set) for prompt in workload.prompts
        )
        asking = asyncio.gather(*asks)
        if victim is not None:
            begun = asyncio.ensure_future(has_begun.wait())
            await asyncio.wait((asking, begun), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            os.kill(await _busiest(client, victim), signal.SIGKILL)
        answers = await asking
        _, missing = await until_healed(client, NUM_WORKERS)
        assert not missing, missing
        return answers


async def _busiest(client: GatewayClient, role: str) -> int:
    """The process of the worker of this role that has the most requests."""
    workers = [worker for worker in (await client.describe())["workers"] if worker["role"] == role]
    pid: int = max(workers, key=lambda worker: sum(worker["requests"].values()))["pid"]
    return pid


async def _ask(
    client: GatewayClient, prompt: tuple[int, ...], sizes: Sizes, salt: str, on_token: Callable[[], None]
) -> Answer:
    """Sends one request. Rounds have different values of `salt`, so that their requests share no cached prefix."""
    sampling: dict[str, Any] = {"max_tokens": sizes.num_tokens, "ignore_eos": True, "temperature": 0.0}
    tokens: list[int] = []
    async for event in client.generate(
        token_ids=prompt, sampling=sampling, mode="disaggregated", cache_salt=salt
    ):
        tokens += event.token_ids
        on_token()
        if event.completion is not None:
            return Answer(tuple(tokens), event.completion.placement["attempts"])
    raise AssertionError("the stream ended without a completion")


def _row(numbers: Numbers, workload: Workload, answers: list[Answer], victim: str | None) -> Row:
    num_asked, pairs = len(answers), list(zip(answers, workload.expected, strict=True))
    num_equal = sum(answer.tokens == expected for answer, expected in pairs)
    num_equal_first = sum(answer.tokens[:1] == expected[:1] for answer, expected in pairs)
    num_moved = sum(answer.num_attempts > 1 for answer in answers)
    is_complete = all(len(answer.tokens) == len(expected) for answer, expected in pairs)
    is_equal = (
        num_equal >= numbers.least_equal * num_asked
        and num_equal_first >= numbers.least_equal_first * num_asked
    )
    return Row(
        PART,
        numbers.name if victim is None else f"{numbers.name}, a {victim} worker killed",
        f"{num_equal} of {num_asked} answers as on the CPU",
        f"first tokens: {num_equal_first}; requests that lost a worker: {num_moved}"
        + ("" if is_complete else "; answers of wrong lengths"),
        is_failed=not is_equal or not is_complete or (num_moved > 0) != (victim is not None),
        figures={
            "equal": num_equal,
            "first_equal": num_equal_first,
            "moved": num_moved,
            "requests": num_asked,
            "ray": ray.__version__,
        },
    )
