"""Bystanders: streams that run during a whole attack. Their answers and their workers must not change."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gateway.client import GatewayClient
from tests.chaos.clients import Clients
from tests.chaos.questions import Question, answer_all, make_questions
from tests.hostile.finding import Finding

NUM_QUESTIONS = 16
MAX_TOKENS = 200
END_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Town:
    """A served fleet, and what its callers ask."""

    target: str
    http: str
    """As host:port."""
    pid: int
    """Of the process that the gateway is in."""
    model: str
    questions: list[Question]


async def settle_town(target: str, http: str, pid: int, seed: int) -> Town:
    """Asks every question once, before any attack."""
    async with GatewayClient(target) as client:
        info = await client.model_info()
        questions = make_questions(random.Random(seed), NUM_QUESTIONS, info["vocab_size"], MAX_TOKENS)
        return Town(target, http, pid, info["model"], await answer_all(client, questions))


class Bystanders:
    """Runs `number` streams while the block lasts. At its end, checks the streams and the workers."""

    def __init__(self, town: Town, finding: Finding, number: int) -> None:
        self._town = town
        self._finding = finding
        self._clients = Clients(town.target, town.questions, number, seed=0)

    async def __aenter__(self) -> None:
        self._before = await self._workers()
        self._memory = memory_mib(self._town.pid)
        self._streaming = asyncio.create_task(self._clients.run())

    async def __aexit__(self, *_: object) -> None:
        self._clients.stop()
        finding, tally = self._finding, self._clients.tally
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._streaming
        except TimeoutError:
            finding.wrong.append(f"streams had not ended {END_TIMEOUT_S:g} s after the attack")
        finding.wrong += tally.wrong
        finding.seen["streams beside it"] = (
            f"{tally.num_right} of {tally.num_streams} as undisturbed, {tally.num_moved} moved, longest gap "
            f"{max(tally.longest_gaps, default=0.0):.2f} s"
        )
        after = await self._workers()
        lost = [name for name, was in self._before.items() if after.get(name) != was]
        finding.seen["workers lost"] = len(lost)
        finding.expect(not lost, f"these workers were replaced: {', '.join(lost)}")
        finding.expect(tally.num_streams > 0, "no stream ran beside it")
        finding.seen["gateway's memory"] = f"{self._memory} -> {memory_mib(self._town.pid)} MiB"

    async def _workers(self) -> dict[str, Any]:
        """Incarnation by name."""
        async with GatewayClient(self._town.target) as client:
            return {worker["name"]: worker["incarnation"] for worker in (await client.describe())["workers"]}


def memory_mib(pid: int) -> int:
    """The memory of a process; its largest memory so far if the system reports this."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    return int(psutil.Process(pid).memory_info().rss) >> 20
