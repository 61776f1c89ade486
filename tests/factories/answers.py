"""Answers of any length as the dispatcher gives them, made without a request."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from baton.request import FinishReason, TokenLogprobs
from gateway.http.openai.answers import MIN_LOGPROB
from gateway.http.openai.logprobs import token_name
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.routing.placement import Mode, Placement
from gateway.text import Tokenizer
from gateway.timing.request_times import Timing

T = TypeVar("T")

LOGPROBS = (-1.5, -0.0, -1e-7, -12.345678901234567, -1e16, -math.inf, math.nan)
"""Log-probabilities that JSON writes in more than one way, or cannot write."""


def finish_of(reason: FinishReason = FinishReason.LENGTH, **fields: object) -> Finish:
    timing = Timing(1.0, (), 0.0, 0.0, 0.0, 0, 0.0, 0.0, 1.0, 0.0, "")
    finish = Finish(reason, None, None, 5, 0, 3, timing, Placement(Mode.LOCAL, None, "d0"), 1)
    return replace(finish, **fields)  # type: ignore[arg-type]


def long_answer(tokenizer: Tokenizer, num_tokens: int, num_top: int | None, tokens_each: int) -> list[Delta]:
    """Deltas of an answer of `num_tokens` tokens of every kind, with `tokens_each` tokens in each delta.

    With `num_top` None, they have no log-probabilities.
    """
    token_ids = [token_id % tokenizer.vocab_size for token_id in range(num_tokens)]
    deltas = []
    for begin in range(0, num_tokens, tokens_each):
        part = tuple(token_ids[begin : begin + tokens_each])
        logprobs = () if num_top is None else tuple(logprobs_of(token_id, num_top) for token_id in part)
        deltas.append(Delta(part, tokenizer.decode(part, False), logprobs))
    return [*deltas[:-1], replace(deltas[-1], finish=finish_of())]


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    def number(at: int) -> float:
        return LOGPROBS[(token_id + at) % len(LOGPROBS)]

    top = tuple(((token_id * 7 + at) % 300, number(at)) for at in range(num_top))
    return TokenLogprobs(token_id, number(0), 1, top)


def top_of(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, float]:
    """`top_logprobs` of a completion at this position; of tokens with one name, the first counts."""
    named: dict[str, float] = {}
    for token_id, logprob in ((position.token_id, position.logprob), *position.top):
        named.setdefault(token_name(tokenizer.token_bytes(token_id)), max(logprob, MIN_LOGPROB))
    return named


class Answering:
    """A request driver that has all of an answer already."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._deltas = deltas

    async def generate(self, _: GatewayRequest) -> AsyncGenerator[Delta, None]:
        for delta in self._deltas:
            yield delta


class WorkClock(asyncio.SelectorEventLoop):
    """An event loop whose time is the work that was noted with `work`.

    So a test sees how much one turn of the loop did, however fast the machine is.
    """

    def __init__(self) -> None:
        self._worked_s = 0.0
        self._turn = 0
        self._done: defaultdict[int, float] = defaultdict(float)
        super().__init__()

    def time(self) -> float:
        return self._worked_s

    def work(self, seconds: float) -> None:
        """Notes work in the current turn."""
        self._worked_s += seconds
        self._done[self._turn] += seconds

    @property
    def longest_turn_s(self) -> float:
        return max(self._done.values())

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        async def counted() -> T:
            counting = asyncio.create_task(self._count())
            try:
                return await test
            finally:
                counting.cancel()

        with asyncio.Runner(loop_factory=lambda: self) as runner:
            return runner.run(counted())

    async def _count(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)


async def batches_from(deltas: Sequence[Delta], index: int = 0) -> AsyncIterator[list[tuple[int, Delta]]]:
    """Yields each delta as soon as the consumer wants it."""
    for delta in deltas:
        yield [(index, delta)]
