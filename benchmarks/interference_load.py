"""Sends chats and long prompts at the same time to `/v1/completions` of any server, and records the answers."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_chats` clients send short prompts, one after another.

    Long prompts arrive at a fixed pace in addition.
    """

    num_chats: int = 4
    chat_prompt: int = 32
    chat_answer: int = 48
    long_prompt: int = 1024
    long_answer: int = 4
    long_every_s: float = 3.0
    seconds: float = 15.0
    """How long clients send requests. Requests that still run after this time are completed, and their latencies
    count."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer as its client received it.

    Times are in seconds; `sent_s` and `arrivals_s` count from the start of the round.
    """

    is_chat: bool
    sent_s: float
    arrivals_s: tuple[float, ...]
    """The time of each piece of the stream that contained tokens."""
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


class Client:
    """Sends requests to one server, each on its own connection."""

    def __init__(self, port: int, model: str, vocab_size: int, seed: str) -> None:
        """Prompts are random tokens, so that no cached prefix helps. Equal seeds make equal prompts."""
        self._port = port
        self._model = model
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self.began = time.perf_counter()

    async def ask(self, prompt_len: int, num_tokens: int, *, is_chat: bool) -> Seen:
        """Runs one streamed request. Raises RuntimeError if the answer is incomplete."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(self._vocab_size) for _ in range(prompt_len)],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s, arrivals_s, num_seen = self._now(), list[float](), 0
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async for event in self._events(json.dumps(body).encode()):
                if event["choices"]:
                    arrivals_s.append(self._now())
                if usage := event.get("usage"):
                    num_seen = usage["completion_tokens"]
        if num_seen != num_tokens:
            raise RuntimeError(f"port {self._port}: asked for {num_tokens} tokens, got {num_seen}")
        return Seen(is_chat, sent_s, tuple(arrivals_s), num_tokens)

    def _now(self) -> float:
        return time.perf_counter() - self.began

    async def _events(self, body: bytes) -> AsyncIterator[Any]:
        """The events of an answer. Each event is an HTTP chunk, so both events and chunk sizes are lines."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
            if b" 200 " not in await reader.readline():
                raise RuntimeError(
                    f"port {self._port} refused: {(await reader.read(2000)).decode(errors='replace')}"
                )
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            writer.close()


async def play(client: Client, workload: Workload) -> list[Seen]:
    """Runs one round, and returns once every request is answered."""
    client.began = time.perf_counter()
    seen: list[Seen] = []

    async def chat(number: int) -> None:
        # If all chats began at once, their decode steps would coincide even without long prompts.
        await asyncio.sleep(number * 0.1)
        while time.perf_counter() - client.began < workload.seconds:
            seen.append(await client.ask(workload.chat_prompt, workload.chat_answer, is_chat=True))

    async def long_prompt(number: int) -> None:
        await asyncio.sleep((number + 0.5) * workload.long_every_s)
        seen.append(await client.ask(workload.long_prompt, workload.long_answer, is_chat=False))

    async with asyncio.TaskGroup() as group:
        for number in range(workload.num_chats):
            group.create_task(chat(number))
        for number in range(round(workload.seconds / workload.long_every_s)):
            group.create_task(long_prompt(number))
    return seen


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest times that a chat may wait for its first token, and between two tokens."""

    ttft_s: float
    gap_s: float

    def is_met_by(self, seen: Seen) -> bool:
        return seen.ttft_s <= self.ttft_s and max(seen.gaps_s, default=0.0) <= self.gap_s


def figures(rounds: list[list[Seen]], workload: Workload, slo: Slo) -> dict[str, float]:
    """Figures over all rounds. If there were no long prompts, figures about them are left out.

    `gap_ms`: between two tokens of a chat; `goodput`: chats per second within the SLO.
    """
    seen = [each for one in rounds for each in one]
    chats, longs = [each for each in seen if each.is_chat], [each for each in seen if not each.is_chat]
    seconds = workload.seconds * len(rounds)
    gaps = [gap for each in chats for gap in each.gaps_s]
    num_in_time = sum(at <= workload.seconds for each in seen for at in each.arrivals_s)
    num_pieces = sum(len(each.arrivals_s) for each in seen)
    num_good = sum(map(slo.is_met_by, chats))
    long_ttfts = [each.ttft_s for each in longs]
    of_longs = {f"long_ttft_p{each}_ms": 1e3 * percentile(long_ttfts, each) for each in (50, 99) if longs}
    return {
        "gap_p50_ms": 1e3 * percentile(gaps, 50),
        "gap_p99_ms": 1e3 * percentile(gaps, 99),
        "gap_max_ms": 1e3 * max(gaps),
        "chat_ttft_p50_ms": 1e3 * percentile((each.ttft_s for each in chats), 50),
        "chat_ttft_p99_ms": 1e3 * percentile((each.ttft_s for each in chats), 99),
        **of_longs,
        "tokens_per_s": num_in_time * sum(each.num_tokens for each in seen) / num_pieces / seconds,
        "chats_per_s": len(chats) / seconds,
        "goodput_chats_per_s": num_good / seconds,
        "good_share": num_good / len(chats),
        "num_chats": len(chats),
        "num_long_prompts": len(longs),
    }


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]
