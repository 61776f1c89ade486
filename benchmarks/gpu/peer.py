"""Our engine and transformers' own, in turn on one device, with equal weights, prompts and numbers of tokens.

transformers runs in processes of its own. If one of its ways to generate fails or hangs, only that process ends. What
it compiles and records shares no memory with our graphs.
"""

import multiprocessing
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

from baton.sampling import SamplingParams
from benchmarks.gpu.build import Dtype, load
from benchmarks.gpu.loop import LoopedEngine, recorded_loop
from benchmarks.gpu.measure import synchronize
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting
from benchmarks.gpu.shapes import DRY, LLAMA_3_1_8B, write_config
from engine.loading.loader import DTYPES
from engine.loading.weights import DummyWeights

PART = "peer"
GOAL = 3.0
WAYS = ("generate, static cache", "generate_batch")
"""The two fast ways of transformers. Which one is faster depends on versions and installed packages. On an H200,
generate_batch of transformers 5.17 failed in a thread of its own and never returned."""

FIRST_ANSWER_TIMEOUT_S, ANSWER_TIMEOUT_S = 270.0, 60.0
"""The first answer includes the process's start, the weights and torch.compile, which takes one to three minutes."""

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload: several prompts at once, all of one length, so that nothing is padded."""

    model: str
    config: dict[str, Any]
    dtype: Dtype
    batch: int
    prompt: int
    num_tokens: int
    block_size: int
    chunk: int
    rounds: int
    compiled: bool


FULL = Sizes("Llama-3.1-8B", LLAMA_3_1_8B, "bfloat16", 64, 512, 128, 64, 4096, 3, True)
TINY = Sizes("tiny", DRY["tiny"], "float32", 2, 3, 4, 32, 8, 1, False)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_dry else FULL
    path = write_config(setting.folder / sizes.model, sizes.config)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(sizes.config["vocab_size"]) for _ in range(sizes.prompt)] for _ in range(sizes.batch)
    ]
    model = load(setting, path, sizes.dtype, dummy=True)
    length = sizes.prompt + sizes.num_tokens + 2
    with recorded_loop(setting, model, sizes.batch, length, sizes.block_size, sizes.chunk) as loop:
        for way in WAYS:
            theirs = TransformersProcess(setting, sizes, way)
            try:
                emit(_compare(setting, sizes, way, prompts, loop, theirs))
            except TransformersError as error:  # the other way may still work
                emit(Row(PART, f"transformers {way}", "failed", str(error)[:200]))
            finally:
                theirs.end()


class TransformersError(Exception):
    """transformers failed, or did not answer in time."""


class TransformersProcess:
    """transformers in its own process, which generates in one way."""

    def __init__(self, setting: Setting, sizes: Sizes, way: str) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the device
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(setting, sizes, way, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._timeout_s = FIRST_ANSWER_TIMEOUT_S

    def generate(self, prompts: Tokens) -> tuple[Tokens, float]:
        """The tokens that transformers generates, and the seconds that this took."""
        try:
            self._pipe.send(prompts)
            if not self._pipe.poll(self._timeout_s):
                raise TransformersError(f"no answer within {self._timeout_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise TransformersError("its process has ended") from None
        self._timeout_s = ANSWER_TIMEOUT_S
        if isinstance(answer, str):
            raise TransformersError(answer)
        tokens, seconds = answer
        return tokens, seconds

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _answer(setting: Setting, sizes: Sizes, way: str, pipe: Connection) -> None:
    """The process of transformers: answers until it is killed, or the other end is gone."""
    if setting.is_dry:
        torch.set_num_threads(1)
    generate: Callable[[Tokens], Tokens] | None = None
    with suppress(EOFError):
        while True:
            prompts = pipe.recv()
            try:
                if generate is None:
                    generate = _ways(setting, sizes, _transformers_model(setting, sizes))[way]
                tokens, seconds = _timed(setting, partial(generate, prompts))
            except Exception as error:  # other code may fail in any way
                pipe.send(f"{type(error).__name__}: {error}")
            else:
                pipe.send((tokens, seconds))


def _compare(
    setting: Setting, sizes: Sizes, way: str, prompts: Tokens, loop: LoopedEngine, theirs: TransformersProcess
) -> Row:
    params = SamplingParams(temperature=0.0, max_tokens=sizes.num_tokens, ignore_eos=True)

    def ours() -> tuple[Tokens, float]:
        return _timed(setting, lambda: loop.run(prompts, [params] * len(prompts)).tokens)

    sides: tuple[Callable[[], tuple[Tokens, float]], ...] = (ours, lambda: theirs.generate(prompts))
    answers = [side()[0] for side in sides]  # warms up graphs, compilers and pages
    rounds = [[side()[1] for side in sides] for _ in range(sizes.rounds)]
    our_s, their_s = (median(side) for side in zip(*rounds, strict=True))
    lengths = {len(tokens) for answer in answers for tokens in answer}
    agree = sum(a[0] == b[0] for a, b in zip(*answers, strict=True)) / len(prompts)
    num_tokens = sizes.batch * sizes.num_tokens
    return Row(
        PART,
        f"{sizes.model} beside transformers {way}",
        f"{their_s / our_s:.2f}x (goal {GOAL:g})",
        f"{sizes.batch} prompts of {sizes.prompt}, {sizes.num_tokens} tokens each: {num_tokens / our_s:,.0f} and "
        f"{num_tokens / their_s:,.0f} tokens/s; first tokens {agree:.0%} equal",
        is_failed=lengths != {sizes.num_tokens} or (sizes.dtype == "float32" and answers[0] != answers[1]),
        figures={
            "ratio": their_s / our_s,
            "our_s": our_s,
            "their_s": their_s,
            "first_token_agreement": agree,
        },
    )


def _transformers_model(setting: Setting, sizes: Sizes) -> Any:
    """transformers' decoder of the same kind, with the same weights."""
    config = AutoConfig.for_model(**sizes.config)
    with torch.device(setting.device):
        theirs = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[sizes.dtype], attn_implementation="sdpa"
        )
    source = DummyWeights(DTYPES[sizes.dtype], setting.device)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(source.take_tensor(name, *parameter.shape))
    return theirs.eval()


def _ways(setting: Setting, sizes: Sizes, model: Any) -> dict[str, Callable[[Tokens], Tokens]]:
    common = {"max_new_tokens": sizes.num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    continuous = GenerationConfig(**common)
    # On a CPU, half of the free memory would be half of the machine's memory, and every page would be written
    # once.
    room = {"num_blocks": 4, "max_batch_tokens": 64} if setting.is_dry else {"max_memory_percent": 0.5}
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **room)
    static = GenerationConfig(**common, cache_implementation="static", disable_compile=not sizes.compiled)

    def batched(prompts: Tokens) -> Tokens:
        outputs = model.generate_batch(
            prompts,
            generation_config=continuous,
            continuous_batching_config=batching,
            persistent_manager=True,
            progress_bar=False,
        )
        return [list(output.generated_tokens) for output in outputs.values()]

    def compiled(prompts: Tokens) -> Tokens:
        input_ids = torch.tensor(prompts, device=model.device)
        out = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=static)
        tokens: Tokens = out[:, input_ids.shape[1] :].tolist()
        return tokens

    return dict(zip(WAYS, (compiled, batched), strict=True))


def _timed(setting: Setting, work: Callable[[], Tokens]) -> tuple[Tokens, float]:
    synchronize(setting.device)
    start = time.perf_counter()
    tokens = work()
    synchronize(setting.device)
    return tokens, time.perf_counter() - start
