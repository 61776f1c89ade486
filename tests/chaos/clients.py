"""Clients that stream all the time, and compare each answer with the answer without faults."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.client import GatewayClient, GatewayError
from tests.chaos.questions import Answer, Question

MAX_WRONG = 20
"""Limit of reported errors; more of the same would add nothing."""


@dataclass(slots=True)
class Tally:
    """What all clients saw. Times are in seconds."""

    num_streams: int = 0
    num_right: int = 0
    num_tokens: int = 0
    num_moved: int = 0
    """Streams that more than one placement had a part in."""
    wrong: list[str] = field(default_factory=list)
    """What may never happen, at most MAX_WRONG of it."""
    num_wrong: int = 0
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """Of each stream, on the monotonic clock: when its longest time without a token began and ended."""

    @property
    def longest_gaps(self) -> list[float]:
        return [ended - began for began, ended in self.stalls]

    def note_wrong(self, what: str) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MAX_WRONG:
            self.wrong.append(what)


class Clients:
    """Runs `number` streams at a time until `stop`. Then each stream runs to its end."""

    def __init__(self, target: str, questions: Sequence[Question], number: int, seed: int) -> None:
        self._target = target
        self._questions = questions
        self._number = number
        self._seed = seed
        self._is_stopping = False
        self.tally = Tally()

    def stop(self) -> None:
        self._is_stopping = True

    async def run(self) -> None:
        """Returns when the last stream has ended after `stop`."""
        async with GatewayClient(self._target) as client, asyncio.TaskGroup() as group:
            for index in range(self._number):
                group.create_task(self._stream_on(client, random.Random(f"{self._seed} {index}")))

    async def _stream_on(self, client: GatewayClient, rng: random.Random) -> None:
        while not self._is_stopping:
            await self._stream(client, rng.choice(self._questions))

    async def _stream(self, client: GatewayClient, question: Question) -> None:
        tally = self.tally
        tally.num_streams += 1
        last_token_at = time.monotonic()
        token_ids, text, finish_reason = list[int](), "", ""
        stall = (last_token_at, last_token_at)
        try:
            async for event in client.generate(token_ids=question.prompt, sampling=question.sampling):
                now = time.monotonic()
                stall = max(stall, (last_token_at, now), key=lambda each: each[1] - each[0])
                last_token_at = now
                token_ids += event.token_ids
                text += event.text
                if event.completion is not None:
                    finish_reason = event.completion.finish_reason
                    tally.num_moved += event.completion.placement["attempts"] > 1
        except GatewayError as error:
            tally.note_wrong(f"after {len(token_ids)} tokens: {error}")
            return
        tally.num_tokens += len(token_ids)
        tally.stalls.append(stall)
        answer = Answer(tuple(token_ids), text, finish_reason)
        if answer == question.answer:
            tally.num_right += 1
        else:
            tally.note_wrong(_difference(question, answer))


def _difference(question: Question, answer: Answer) -> str:
    expected = question.answer
    assert expected is not None
    for position, (ours, theirs) in enumerate(zip(answer.token_ids, expected.token_ids, strict=False)):
        if ours != theirs:
            return f"token {position} is {ours} instead of {theirs}; sampling {question.sampling}"
    return (
        f"{len(answer.token_ids)} tokens and {answer.finish_reason!r} instead of {len(expected.token_ids)} and "
        f"{expected.finish_reason!r}, text {answer.text!r} instead of {expected.text!r}"
    )
