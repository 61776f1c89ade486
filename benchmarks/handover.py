"""What a hand-over costs: a prefill worker or the decode worker itself computes the same prompts, in turn.

    python -m benchmarks.handover [--model DIR] [--dtype bfloat16] [--transports NAME ...] [--json FILE]

Real worker processes and the real gateway run on one host, with a cluster for each transport. Each figure is
a median over alternating rounds:

    ttft        request to token 0, at the client; local and disaggregated, and their ratio
    gap         token 0 to token 1 at the gateway: the hand-over and the first decode step
    step        a decode step: the median of the later gaps of the same requests
    overhead    gap minus step: the time that the client waits for the hand-over
    exposed     end of the prefill to the consumer's report that all blocks arrived, on the prefill worker's
                clock
    moved       bytes, and the time from the first block's arrival to the last block's verification on the
                decode worker (overlaps the prefill)
"""

import argparse
import asyncio
import os
import platform
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from baton.config import BatonConfig
from baton.kv import TransferRole
from benchmarks.json_file import save_json
from cluster.serve.child_processes import child_processes
from engine.loading.pretrained import default_cache_dir, resolve
from gateway import GatewayClient
from gateway.client import GenerationEnd

NUM_NEW_TOKENS = 12
MAX_TRIES = 3
Mode = Literal["disaggregated", "local"]


@dataclass(slots=True)
class Rounds:
    """The figures of every round for one prompt length, in milliseconds and bytes."""

    local_ttft_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    moving_ms: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def note_local(self, completion: GenerationEnd) -> None:
        self.local_ttft_ms.append(completion.timing["ttft_s"] * 1e3)

    def note(self, completion: GenerationEnd) -> None:
        timing = completion.timing
        [given] = producer_records(completion)
        self.exposed_ms.append(given["exposed_s"] * 1e3)
        self.ttft_ms.append(timing["ttft_s"] * 1e3)
        self.gap_ms.append(timing["itl_s"][0] * 1e3)
        self.step_ms.append(median(timing["itl_s"][1:]) * 1e3)
        self.moving_ms.append(timing["transfer_s"] * 1e3)
        self.num_bytes = timing["transfer_bytes"]


def producer_records(completion: GenerationEnd) -> list[dict[str, Any]]:
    """The prefill worker's record of the hand-over; empty if it came after the answer's end."""
    return [each for each in completion.timing["transfers"] if each["role"] == TransferRole.PRODUCER.value]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians for one transport and prompt length."""

    transport: str
    prompt_tokens: int
    local_ttft_ms: float
    ttft_ms: float
    ttft_ratio: float
    gap_ms: float
    step_ms: float
    overhead_ms: float
    overhead_share_of_ttft: float
    exposed_ms: float
    exposed_share_of_ttft: float
    moved_mib: float
    moving_ms: float

    @classmethod
    def of(cls, transport: str, prompt_tokens: int, rounds: Rounds) -> "Result":
        ttft_ms = median(rounds.ttft_ms)
        # The gap and the step come from the same request, since the machine's speed changes between requests.
        overhead_ms = median(gap - step for gap, step in zip(rounds.gap_ms, rounds.step_ms, strict=True))
        return cls(
            transport=transport,
            prompt_tokens=prompt_tokens,
            local_ttft_ms=median(rounds.local_ttft_ms),
            ttft_ms=ttft_ms,
            ttft_ratio=median(a / b for a, b in zip(rounds.ttft_ms, rounds.local_ttft_ms, strict=True)),
            gap_ms=median(rounds.gap_ms),
            step_ms=median(rounds.step_ms),
            overhead_ms=overhead_ms,
            overhead_share_of_ttft=overhead_ms / ttft_ms,
            exposed_ms=median(rounds.exposed_ms),
            exposed_share_of_ttft=median(
                a / b for a, b in zip(rounds.exposed_ms, rounds.ttft_ms, strict=True)
            ),
            moved_mib=rounds.num_bytes / 2**20,
            moving_ms=median(rounds.moving_ms),
        )


async def measure(
    config: BatonConfig, model_path: Path, lengths: Sequence[int], num_rounds: int
) -> list[Result]:
    """Alternates the two modes, round by round, over all prompt lengths. The first round only warms up."""
    rounds = {length: Rounds() for length in lengths}
    rng = random.Random(0)
    async with child_processes(config, model_path) as cluster, GatewayClient(cluster.target) as client:
        for number in range(num_rounds + 1):
            for length in lengths:
                prompt = [rng.randrange(1_000, 20_000) for _ in range(length)]
                modes: list[Mode] = ["local", "disaggregated"]
                for mode in modes if number % 2 else reversed(modes):
                    completion = await complete_with_records(client, prompt, mode, f"{mode} {number}")
                    if number > 0:
                        note = rounds[length].note_local if mode == "local" else rounds[length].note
                        note(completion)
    return [Result.of(config.kv_transfer.transport, length, rounds[length]) for length in lengths]


async def complete_with_records(
    client: GatewayClient, prompt: list[int], mode: Mode, salt: str
) -> GenerationEnd:
    """Like `complete`. Repeats a hand-over whose prefill worker reported too late, for example on a busy machine."""
    for number in range(MAX_TRIES):
        completion = await complete(client, prompt, mode, f"{salt} {number}")
        if mode == "local" or producer_records(completion):
            return completion
    raise RuntimeError(f"{MAX_TRIES} answers in a row had no record of the prefill worker")


async def complete(client: GatewayClient, prompt: list[int], mode: Mode, salt: str) -> GenerationEnd:
    """Runs one greedy request. The salt keeps the request from using the prefix caches of earlier rounds."""
    sampling = {"temperature": 0.0, "max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    async for event in client.generate(token_ids=prompt, sampling=sampling, mode=mode, cache_salt=salt):
        if event.completion is not None:
            return event.completion
    raise AssertionError("the stream ended without a completion")


def show(results: Sequence[Result], console: Console) -> None:
    table = Table(title="hand-over, medians", title_justify="left")
    for name in (
        "transport",
        "prompt",
        "ttft local",
        "ttft P/D",
        "ratio",
        "gap",
        "step",
        "overhead",
        "of ttft",
        "exposed",
        "of ttft",
        "moved",
        "moving",
    ):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.transport,
            f"{r.prompt_tokens}",
            f"{r.local_ttft_ms:.0f} ms",
            f"{r.ttft_ms:.0f} ms",
            f"{r.ttft_ratio:.3f}",
            f"{r.gap_ms:.1f} ms",
            f"{r.step_ms:.1f} ms",
            f"{r.overhead_ms:.1f} ms",
            f"{r.overhead_share_of_ttft:.1%}",
            f"{r.exposed_ms:.1f} ms",
            f"{r.exposed_share_of_ttft:.2%}",
            f"{r.moved_mib:.1f} MiB",
            f"{r.moving_ms:.1f} ms",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a hand-over costs.")
    parser.add_argument("--model", default="smollm2", help="model folder or name (default: smollm2)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 4096])
    parser.add_argument("--transports", nargs="+", default=["shared_memory", "zmq_tcp"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    model_path = resolve(options.model, default_cache_dir(os.environ))
    results = []
    for transport in options.transports:
        config = BatonConfig.from_mapping(
            {
                "model": {"dtype": options.dtype},
                "gateway": {"grpc_port": 0, "http_port": None},
                "network": {"peer_timeout_s": 60.0},
                "kv_transfer": {"peer_timeout_s": 60.0, "transport": transport},
            }
        )
        results += asyncio.run(measure(config, model_path, options.lengths, options.rounds))
    show(results, Console(width=150))
    if options.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        figures = {
            "model": options.model,
            "dtype": options.dtype,
            "machine": machine,
            "rounds": options.rounds,
        }
        save_json(options.json, {**figures, "results": [asdict(r) for r in results]})


if __name__ == "__main__":
    main()
