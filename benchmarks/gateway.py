"""What a gateway costs: tokens per second of its CPU time, and its part of the time to first token.

    python -m benchmarks.gateway [--streams 1 64 512] [--offered 30000] [--rounds 3] [--model FOLDER]
        [--json FILE]

There is one gateway process and one worker that computes nothing (benchmarks/gateway_engine.py). The worker
offers as many tokens per second as requested. The clients run in this process. Four ways take turns: gRPC,
HTTP (`/v1/completions`, streamed), `chat` (HTTP with `/v1/chat/completions` and no tools), and `bare`. `bare`
is a gRPC server that sends the same messages without a gateway. Figures are medians over the rounds.

    tokens/s        tokens that reached the clients, all streams together
    per core        tokens per second of the serving process' own CPU time
    together        tokens in one message: tokens that arrive while the previous message is being sent are joined
    ttft            time from a request to its first token at the client; requests run one after another. The
                    worker answers at once, so this is the time of the gateway, the request plane and the client.
                    `added` is the difference to `bare`
    cpu             CPU time of the serving process for one of these requests, until after its last token
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import grpc.aio
import psutil
from rich.console import Console
from rich.table import Table

from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from baton.v1 import sampling_pb2
from benchmarks.json_file import save_json
from tests.factories.models import make_model_dir

PROMPT = list(range(40, 56))
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
NUM_ALONE = 200
"""Number of requests that measure the time to first token."""
TOKENS_IN_ALL = 40_000
LEAST_TOKENS, MOST_TOKENS = 256, 2000
"""The number of tokens of one stream lies between these bounds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client of one stream received."""

    num_tokens: int
    num_messages: int
    ttft_s: float


Ask = Callable[[int], Awaitable[Seen]]
"""Runs a request for this many tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_per_s: float
    tokens_per_core: float
    together: float


class Side:
    """A serving process that is measured."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = psutil.Process(process.pid)
        ports = json.loads(process.stdout.readline())
        self.grpc_port, self.http_port = ports["grpc"], ports["http"]

    @property
    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


@contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs a module of this package as a process, which ends with the `with` block."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


async def by_grpc(stub: "pb_grpc.GenerationServiceAsyncStub", num_tokens: int) -> Seen:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling_params=sampling_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0),
    )
    began, ttft_s = time.perf_counter(), 0.0
    num_seen = num_messages = 0
    async for response in stub.Generate(request):
        ttft_s = ttft_s or time.perf_counter() - began
        num_seen += len(response.token_ids)
        num_messages += 1
    return Seen(num_seen, num_messages, ttft_s)


class HttpClient:
    """A client that keeps its connections, as every client does, and reads lines.

    A full HTTP client would use so much time that the benchmark would measure the client.
    """

    def __init__(self, port: int, path: str, prompt: dict[str, object]) -> None:
        """`prompt` has the fields of the request's body that differ between paths."""
        self._port = port
        self._path = path
        self._prompt = prompt
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, num_tokens: int) -> Seen:
        body = json.dumps(
            {
                "model": "benchmark",
                **self._prompt,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        began, ttft_s = time.perf_counter(), 0.0
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        )
        head = f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(2000)
        num_messages, last = 0, b""
        while (line := await reader.readline()) != b"0\r\n":  # the last chunk
            if (
                line.startswith(b"data: {") and b'"role":' not in line
            ):  # a chat's first event contains only the role
                ttft_s = ttft_s or time.perf_counter() - began
                num_messages += 1
                last = line
        await reader.readline()
        self._idle.append((reader, writer))
        usage = json.loads(last.removeprefix(b"data: "))["usage"]
        return Seen(usage["completion_tokens"], num_messages - 1, ttft_s)


async def measure_streams(ask: Ask, side: Side, num_streams: int) -> Figures:
    """Runs many streams at once."""
    num_tokens = max(LEAST_TOKENS, min(MOST_TOKENS, TOKENS_IN_ALL // num_streams))
    began, began_cpu_s = time.perf_counter(), side.cpu_s
    seen = await asyncio.gather(*[ask(num_tokens) for _ in range(num_streams)])
    elapsed_s, cpu_s = time.perf_counter() - began, side.cpu_s - began_cpu_s
    assert all(each.num_tokens == num_tokens for each in seen), "a stream ended early"
    total = num_streams * num_tokens
    return Figures(total / elapsed_s, total / cpu_s, total / sum(each.num_messages for each in seen))


async def measure_alone(ask: Ask, side: Side) -> tuple[list[float], float]:
    """Runs requests one after another. Returns their times to first token, and the CPU time of one request, in ms."""
    began_cpu_s = side.cpu_s
    ttft_ms = [(await ask(1)).ttft_s * 1e3 for _ in range(NUM_ALONE)]
    return ttft_ms, (side.cpu_s - began_cpu_s) * 1e3 / NUM_ALONE


async def measure(options: argparse.Namespace, gateway: Side, bare: Side) -> dict[str, object]:
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{bare.grpc_port}") as bare_channel,
    ):
        stub, bare_stub = pb_grpc.GenerationServiceStub(channel), pb_grpc.GenerationServiceStub(bare_channel)
        port = gateway.http_port
        assert port is not None
        ways: dict[str, tuple[Ask, Side]] = {
            "bare": (lambda count: by_grpc(bare_stub, count), bare),
            "grpc": (lambda count: by_grpc(stub, count), gateway),
            "http": (HttpClient(port, "/v1/completions", {"prompt": PROMPT}).ask, gateway),
            "chat": (HttpClient(port, "/v1/chat/completions", {"messages": MESSAGES}).ask, gateway),
        }
        for ask, _ in ways.values():
            await ask(LEAST_TOKENS)  # warms up: some work happens only once
        ttft_ms: dict[str, list[float]] = {way: [] for way in ways}
        cpu_ms: dict[str, list[float]] = {way: [] for way in ways}
        loads: dict[str, dict[int, list[Figures]]] = {way: {n: [] for n in options.streams} for way in ways}
        for _ in range(options.rounds):
            for way, (ask, side) in ways.items():
                times_ms, one_cpu_ms = await measure_alone(ask, side)
                ttft_ms[way] += times_ms
                cpu_ms[way].append(one_cpu_ms)
                for num_streams in options.streams:
                    loads[way][num_streams].append(await measure_streams(ask, side, num_streams))
        return {
            "ttft_ms": {way: _percentiles(values) for way, values in ttft_ms.items()},
            "cpu_ms": {way: round(median(values), 3) for way, values in cpu_ms.items()},
            "streams": {
                way: {str(n): _medians(figures) for n, figures in by_count.items()}
                for way, by_count in loads.items()
            },
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {"p50": round(median(values), 3), "p99": round(quantiles(values, n=100)[98], 3)}


def _medians(figures: list[Figures]) -> dict[str, float]:
    return {
        "tokens_per_s": round(median(each.tokens_per_s for each in figures)),
        "tokens_per_core": round(median(each.tokens_per_core for each in figures)),
        "together": round(median(each.together for each in figures), 2),
    }


def report(figures: dict[str, dict[str, dict[str, dict[str, float]]]], console: Console) -> None:
    table = Table("way", "streams", "tokens/s", "per core", "together")
    for way, by_count in figures["streams"].items():
        for count, each in by_count.items():
            table.add_row(
                way,
                count,
                f"{each['tokens_per_s']:,}",
                f"{each['tokens_per_core']:,}",
                f"{each['together']:.1f}",
            )
    console.print(table)
    table = Table("way", "ttft p50", "p99", "added p50", "added p99", "cpu")
    bare: dict[str, float] = figures["ttft_ms"]["bare"]  # type: ignore[assignment]
    for way, ttft in figures["ttft_ms"].items():
        p50, p99 = (float(ttft[name]) for name in ("p50", "p99"))  # type: ignore[arg-type]
        table.add_row(
            way,
            f"{p50:.2f} ms",
            f"{p99:.2f} ms",
            f"{p50 - bare['p50']:.2f} ms",
            f"{p99 - bare['p99']:.2f} ms",
            f"{figures['cpu_ms'][way]:.2f} ms",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--offered", type=float, default=30_000.0, help="tokens/s that the worker offers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="folder with a tokenizer; default a tiny one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model_dir(Path(folder) / "model")
        with started("benchmarks.gateway_engine", str(options.offered)) as engine:
            assert engine.stdout is not None
            endpoint = engine.stdout.readline()
            with (
                started("benchmarks.gateway_side", "gateway", str(model), endpoint) as gateway,
                started("benchmarks.gateway_side", "bare", str(options.offered)) as bare,
            ):
                figures = asyncio.run(measure(options, Side(gateway), Side(bare)))
    report(figures, Console())  # type: ignore[arg-type]
    if options.json is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        save_json(options.json, {"machine": machine, "offered": options.offered, **figures})


if __name__ == "__main__":
    main()
