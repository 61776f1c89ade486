"""The scenes that one served fleet goes through: grammars, whole answers, a gateway that stands still."""

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from baton.sampling import GrammarKind
from gateway.client import GatewayClient
from tests.factories.hostile_grammars import SHAPES
from tests.hostile.bystanders import Bystanders, Town
from tests.hostile.finding import Finding
from tests.hostile.http import post, watched_health

NUM_CALLERS = 4
STANDSTILL_S = 20.0
NUM_LARGE, LARGE_LENGTH, LARGE_MIB = 50, 3_200, 24
MOST_GROWN_MIB = 600
"""256 MiB of compiled grammars are kept; their allocator holds some more, and so do streams that run meanwhile."""

FIELDS = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}

Scene = Callable[[Town, int, int], Awaitable[Finding]]
"""A town, how many streams run beside it, and how many calls each hostile caller makes."""


async def grammars(town: Town, num_streams: int, num_calls: int) -> Finding:
    """Hostile grammars from several callers, all shapes in turn, at the size of the longest text that is allowed."""
    finding = Finding(f"{NUM_CALLERS} callers send {num_calls} hostile grammars each")
    shapes = itertools.cycle(SHAPES.items())
    statuses: dict[int, int] = {}

    async def caller() -> None:
        for _ in range(num_calls):
            name, shape = next(shapes)
            body = {"structured_outputs": {FIELDS[shape.kind]: shape.of().source}, "max_tokens": 16}
            began = time.monotonic()
            status, answer = await post(town.http, "/v1/completions", _completion(town, body))
            statuses[status] = statuses.get(status, 0) + 1
            finding.seen[name] = f"{status} after {time.monotonic() - began:.2f} s {_problem(answer)}"
            finding.expect(status in (200, 400), f"{name}: {status} {answer[:300]!r}")

    with watched_health(town.http) as health:
        async with Bystanders(town, finding, num_streams), asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLERS):
                group.create_task(caller())
    body = _completion(town, {"structured_outputs": {"regex": "(yes|no)+"}, "max_tokens": 16})
    finding.expect(
        (await post(town.http, "/v1/completions", body))[0] == 200, "an ordinary grammar afterwards"
    )
    finding.seen["answers"] = ", ".join(f"{count} x {status}" for status, count in statuses.items())
    finding.seen["slowest /health"] = f"{health.worst_s:.2f} s"
    return finding


async def kept_grammars(town: Town, num_streams: int, _num_calls: int) -> Finding:
    """Different grammars of a legal size, one after the other: workers keep some of them for the next request."""
    finding = Finding(f"{NUM_LARGE} different grammars that take some {LARGE_MIB} MiB each")
    async with GatewayClient(town.target) as client:
        pids = {worker["name"]: worker["pid"] for worker in (await client.describe())["workers"]}
    before = {name: _resident_mib(pid) for name, pid in pids.items()}
    async with Bystanders(town, finding, num_streams):
        for number in range(NUM_LARGE):
            body = {"structured_outputs": {"regex": "a?" * (LARGE_LENGTH + number)}, "max_tokens": 2}
            status, answer = await post(town.http, "/v1/completions", _completion(town, body))
            finding.expect(status == 200, f"grammar {number}: {status} {answer[:300]!r}")
    grown = {name: _resident_mib(pid) - before[name] for name, pid in pids.items()}
    finding.seen["workers' memory grew by"] = ", ".join(f"{name}: {mib} MiB" for name, mib in grown.items())
    finding.expect(max(grown.values()) < MOST_GROWN_MIB, f"workers' memory grew by {grown} MiB")
    return finding


async def whole_answers(town: Town, num_streams: int, _num_calls: int) -> Finding:
    """The largest answers that one call may ask for, without streaming."""
    finding = Finding("whole answers with 20 log probabilities a token")
    with watched_health(town.http) as health:
        async with Bystanders(town, finding, num_streams):
            for n, max_tokens in ((128, 1_500), (128, 1_000), (32, 500)):
                body = {
                    "model": town.model,
                    "messages": [{"role": "user", "content": "hi"}],
                    "n": n,
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                    "logprobs": True,
                    "top_logprobs": 20,
                }
                status, answer = await post(town.http, "/v1/chat/completions", body)
                size = f"{len(answer) / 2**20:.1f} MiB" if status == 200 else _problem(answer)
                finding.seen[f"{n} x {max_tokens} tokens"] = f"{status} {size}"
                finding.expect(status in (200, 400), f"{n} x {max_tokens}: {status} {answer[:300]!r}")
                if status == 200:  # parsing so much would delay the streams, which run in this process
                    finding.expect(answer.count(b'"finish_reason":"length"') == n, "answers are missing")
    finding.seen["slowest /health"] = f"{health.worst_s:.2f} s"
    return finding


async def standstill(town: Town, num_streams: int, _num_calls: int) -> Finding:
    """The process of the gateway and of the workers' supervisor stands still for a while."""
    finding = Finding(f"the gateway's process is stopped for {STANDSTILL_S:g} s, and goes on")
    async with Bystanders(town, finding, num_streams):
        await asyncio.sleep(1.0)  # streams are under way
        os.kill(town.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STANDSTILL_S)
        finally:
            os.kill(town.pid, signal.SIGCONT)
        await asyncio.sleep(5.0)  # so long that it might count as a peer's silence
    return finding


SCENES: dict[str, Scene] = {
    "grammars": grammars,
    "kept-grammars": kept_grammars,
    "answers": whole_answers,
    "standstill": standstill,
}


def _resident_mib(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss) >> 20


def _completion(town: Town, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": town.model, "prompt": [5, 6, 7], **body}


def _problem(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])[:110]
    except (ValueError, KeyError, TypeError):
        return ""
