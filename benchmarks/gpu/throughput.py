"""Many requests through the gateway and worker processes, compared with the engine alone: what the service costs.

    python -m benchmarks.gpu.throughput TARGET NUM_REQUESTS PROMPT_LENGTH NUM_TOKENS

This command is a client. It sends all its requests at once whenever it reads a line, and prints a line of JSON
when they have ended. Several clients run at the same time, so that no client is the bottleneck.
"""

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from baton.config import BatonConfig
from baton.sampling import SamplingParams
from benchmarks.gpu.build import Dtype, free_bytes, load
from benchmarks.gpu.loop import recorded_loop
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from benchmarks.gpu.shapes import LLAMA_3_1_8B, TINY, write_config
from cluster.serve.child_processes import child_processes
from engine.loading.pretrained import default_cache_dir, is_cached, resolve
from gateway import GatewayClient, Tokenizer
from tests.factories.models import make_tokenizer_dir

PART = "throughput"
ROOT = Path(__file__).parents[2]
TOKENIZER = "smollm2"
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload: requests that all begin at once."""

    name: str
    config: dict[str, Any]
    dtype: Dtype
    num_requests: int
    prompt_length: int
    num_tokens: int
    chunk: int
    num_clients: int
    """Client processes; each sends an equal part of the requests."""
    rounds: int

    @property
    def length(self) -> int:
        """Room for the tokens of a request."""
        return self.prompt_length + self.num_tokens + 2


FULL = Sizes("Llama-3.1-8B", LLAMA_3_1_8B, "bfloat16", 64, 512, 128, 4096, 4, 3)
SMALL = Sizes("tiny", TINY, "float32", 4, 20, 6, 64, 2, 1)


def run(setting: Setting, emit: Emit) -> None:
    sizes = SMALL if setting.is_dry else FULL
    path = _folder(setting, sizes)
    alone: list[float] = []
    guarded(emit, PART, "the engine alone", partial(_engine_alone, setting, sizes, path, alone))
    free_bytes(setting)  # the workers need the memory
    for name, num_prefill in (("one worker", 0), ("a prefill and a decode worker", 1)):
        guarded(emit, PART, name, partial(_served, setting, sizes, path, name, num_prefill, alone))


def _folder(setting: Setting, sizes: Sizes) -> Path:
    """A model of random weights with a real tokenizer, if there is one in the cache."""
    path, cache = setting.folder / "throughput", default_cache_dir(os.environ)
    path.mkdir()
    if not setting.is_dry and is_cached(TOKENIZER, cache):
        for file in resolve(TOKENIZER, cache).glob("*token*"):
            shutil.copy(file, path)
    else:
        make_tokenizer_dir(path)
    return write_config(path, {**sizes.config, "vocab_size": Tokenizer(path).vocab_size})


def _engine_alone(setting: Setting, sizes: Sizes, path: Path, alone: list[float]) -> Iterator[Row]:
    """Scheduler and runner in a loop in this process, without clients."""
    model = load(setting, path, sizes.dtype, dummy=True)
    params = SamplingParams(temperature=0.0, max_tokens=sizes.num_tokens, ignore_eos=True)
    prompts = _prompts(sizes.num_requests, sizes.prompt_length, model.vocab_size)
    with recorded_loop(setting, model, sizes.num_requests, sizes.length, BLOCK_SIZE, sizes.chunk) as loop:
        times = []
        for _ in range(1 + sizes.rounds):
            began = time.monotonic()
            loop.run(prompts, [params] * len(prompts))
            times.append(time.monotonic() - began)
    alone.append(sizes.num_requests * sizes.num_tokens / median(times[1:]))
    yield Row(
        PART,
        f"{sizes.name}, the engine alone",
        f"{alone[0]:,.0f} tokens/s",
        f"{sizes.num_requests} prompts of {sizes.prompt_length}, {sizes.num_tokens} tokens each",
        figures={"tokens_per_s": alone[0]},
    )


def _prompts(number: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random()  # without a seed, so that clients and rounds share no prefix
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(number)]


def _served(
    setting: Setting, sizes: Sizes, path: Path, name: str, num_prefill: int, alone: list[float]
) -> Iterator[Row]:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": sizes.dtype, "load_format": "dummy"},
            "engine": {"device": setting.device.type},
            "scheduler": {
                "max_num_seqs": sizes.num_requests,
                "max_num_batched_tokens": sizes.chunk,
                "max_model_len": sizes.length,
                "num_blocks": 2 + sizes.num_requests * -(-sizes.length // BLOCK_SIZE),
                "block_size": BLOCK_SIZE,
            },
            "cluster": {"prefill": num_prefill, "decode": 1},
            "gateway": {
                "grpc_port": 0,
                "http_port": None,
                "routing_mode": "disaggregated" if num_prefill else "local",
            },
            "network": {"peer_timeout_s": 60.0},
            "kv_transfer": {"peer_timeout_s": 60.0},
        }
    )
    rounds = asyncio.run(_rounds(config, path, sizes))
    seconds = [max(times[-1] for times in each) - began for began, each in rounds]
    rate = sizes.num_requests * sizes.num_tokens / median(seconds)
    first_s = [times[0] - began for began, each in rounds for times in each]
    gaps_s = sorted(
        later - earlier for _, each in rounds for times in each for earlier, later in pairwise(times)
    )
    yield Row(
        PART,
        f"{sizes.name}, {name}",
        f"{rate:,.0f} tokens/s, {rate / alone[0]:.0%} of the engine" if alone else f"{rate:,.0f} tokens/s",
        f"medians: first token {1e3 * median(first_s):,.0f} ms, between parts of an answer {_gaps_text(gaps_s)}",
        figures={"tokens_per_s": rate, "seconds": seconds, "first_token_s": median(first_s)},
    )


def _gaps_text(gaps_s: Sequence[float]) -> str:
    """`gaps_s`: sorted; empty if each answer came in one part, which may happen on a busy machine."""
    if not gaps_s:
        return "none"
    return f"{1e3 * median(gaps_s):.1f} ms; 99 % below {1e3 * gaps_s[int(0.99 * (len(gaps_s) - 1))]:.1f} ms"


async def _rounds(config: BatonConfig, path: Path, sizes: Sizes) -> list[tuple[float, list[list[float]]]]:
    """For each round: its beginning, and the times at which the parts of each request's answer arrived."""
    assert sizes.num_requests % sizes.num_clients == 0
    number = str(sizes.num_requests // sizes.num_clients)
    rounds, clients = [], []
    async with child_processes(config, path) as cluster:
        try:
            for _ in range(sizes.num_clients):
                client = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "benchmarks.gpu.throughput", cluster.target),
                    *(number, str(sizes.prompt_length), str(sizes.num_tokens)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=2**24,
                    cwd=ROOT,
                )
                clients.append(client)
            await asyncio.gather(*map(_order, clients))  # warms up
            for _ in range(sizes.rounds):
                began = time.monotonic()
                answers = await asyncio.gather(*map(_order, clients))
                rounds.append((began, [times for answer in answers for times in answer]))
        finally:
            for client in clients:
                client.kill()
                await client.wait()
    return rounds


async def _order(client: asyncio.subprocess.Process) -> list[list[float]]:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"\n")
    line = await client.stdout.readline()
    assert line, "a client ended; its error is above"
    times: list[list[float]] = json.loads(line)
    return times


async def _client(target: str, number: int, length: int, num_tokens: int) -> None:
    async with GatewayClient(target) as client:
        vocab_size = int((await client.model_info())["vocab_size"])
        prompts = _prompts(number, length, vocab_size)
        while await asyncio.to_thread(sys.stdin.readline):
            times = await asyncio.gather(*(_ask(client, prompt, num_tokens) for prompt in prompts))
            print(json.dumps(times), flush=True)
            prompts = _prompts(number, length, vocab_size)


async def _ask(client: GatewayClient, prompt: list[int], num_tokens: int) -> list[float]:
    """When the parts of the answer arrived, by the machine's clock. A part has one token or more."""
    sampling = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    times, num_received = [], 0
    async for event in client.generate(token_ids=prompt, sampling=sampling):
        if event.token_ids:
            times.append(time.monotonic())
            num_received += len(event.token_ids)
    assert num_received == num_tokens, f"{num_received} tokens instead of {num_tokens}"
    return times


if __name__ == "__main__":
    target, *numbers = sys.argv[1:]
    asyncio.run(_client(target, *map(int, numbers)))
