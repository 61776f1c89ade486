"""All answers to one call: as they come, or collected whole, in turns so that other calls run in between."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from types import MappingProxyType

from baton.errors import InvalidRequest
from gateway.conversation import AnswerEvent, parsed
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, GatewayRequest
from gateway.turn_budget import TurnBudget

MAX_CHOICES = 128
"""Answers to one request, over all of its prompts; OpenAI's bound on `n`."""

ChoiceDelta = tuple[int, Delta]
"""Which answer it belongs to, and the delta."""

MAX_VALUES = 3 * 2**20
"""The most values of one answer, over all choices: each token is a value, and so is each of its top log-probabilities.

So that one answer may fill a context of 131,072 tokens with 20 log-probabilities each. That costs tens of MiB
(docs/security.md).
"""

PORTION_TOKENS = 128
"""Collected at once: with all their log-probabilities about a millisecond's work."""

NO_NAMES: Mapping[str, str] = MappingProxyType({})


async def batches_of(
    driver: RequestDriver, requests: Sequence[GatewayRequest]
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    """Each answer's deltas in order, up to its finish; those that are there at once come at once. If one fails, so do
    all; closing ends all of them everywhere."""
    if len(requests) == 1:
        async with aclosing(driver.generate(requests[0])) as deltas:
            async for delta in deltas:
                yield ((0, delta),)
        return
    waiting: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(len(requests))
    tasks = [
        asyncio.create_task(_pump(driver, index, request, waiting)) for index, request in enumerate(requests)
    ]
    num_open = len(tasks)
    try:
        while num_open:
            items = [await waiting.get()]
            while not waiting.empty():
                items.append(waiting.get_nowait())
            if batch := [item for item in items if not isinstance(item, Exception)]:
                num_open -= sum(delta.finish is not None for _, delta in batch)
                yield batch
            for item in items:
                if isinstance(item, Exception):
                    raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(
    driver: RequestDriver,
    index: int,
    request: GatewayRequest,
    waiting: "asyncio.Queue[ChoiceDelta | Exception]",
) -> None:
    try:
        async with aclosing(driver.generate(request)) as deltas:
            async for delta in deltas:
                await waiting.put((index, delta))
    except Exception as error:
        await waiting.put(error)


class AnswerParsers:
    """What the answers to one call say: each delta's text as events."""

    def __init__(self, requests: Sequence[GatewayRequest]) -> None:
        self._parsers = [request.new_parser() for request in requests]

    @property
    def are_needed(self) -> bool:
        """Some answer may be more than text."""
        return any(parser is not None for parser in self._parsers)

    def events(self, index: int, delta: Delta) -> list[AnswerEvent]:
        """The events that are certain with this delta of the answer `index`; its deltas must come in order."""
        return parsed(self._parsers[index], delta.text, delta.finish is not None)


def call_id(request_id: str, index: int, prefix: str = "call_") -> str:
    """A name for the call `index` of an answer, by which the tool's result refers to it. As unique as the id of the
    answer's request, and the same whenever it is made."""
    digest = blake2b(f"{request_id}/{index}".encode(), digest_size=12)
    return prefix + digest.hexdigest()


def check_whole_answer(requests: Sequence[GatewayRequest], names: Mapping[str, str] = NO_NAMES) -> None:
    """InvalidRequest if the answers together could hold more than MAX_VALUES. Without `max_tokens` an answer may fill
    the room after its prompt, so that counts. `names`: what the client calls fields that we call otherwise."""
    num_values = sum(map(_num_values, requests))
    if num_values <= MAX_VALUES:
        return
    longest = max(request.sampling_params.max_tokens for request in requests)
    num_top = requests[0].sampling_params.logprobs or 0
    max_tokens, logprobs = (names.get(name, name) for name in ("max_tokens", "logprobs"))
    fitting = MAX_VALUES // (len(requests) * (1 + num_top))
    fewer = f"lower {logprobs} or n" if num_top else "lower n"
    raise InvalidRequest(
        max_tokens,
        f"an answer that is not streamed may hold {MAX_VALUES} values; this one may have {num_values}: {len(requests)} "
        f"answers x {longest} tokens x {1 + num_top} values (the token and {num_top} {logprobs}). Set {max_tokens} to "
        f"at most {fitting}, {fewer}, or set stream: true",
    )


def _num_values(request: GatewayRequest) -> int:
    params = request.sampling_params
    return params.max_tokens * (1 + (params.logprobs or 0))


async def in_turns(batches: AsyncIterator[Sequence[ChoiceDelta]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Deltas to collect, one at a time and none of more than PORTION_TOKENS; others run in between."""
    budget = TurnBudget(asyncio.get_running_loop().time)
    async for batch in batches:
        for index, delta in batch:
            for part in _parts(delta):
                yield index, part
                await budget.pause_if_spent()


def _parts(delta: Delta) -> Iterator[Delta]:
    """Each has as much of the text as of the tokens; the last one has the finish."""
    num_tokens = len(delta.token_ids)
    if num_tokens <= PORTION_TOKENS:
        yield delta
        return
    for begin in range(0, num_tokens, PORTION_TOKENS):
        end = min(begin + PORTION_TOKENS, num_tokens)
        text = slice(begin * len(delta.text) // num_tokens, end * len(delta.text) // num_tokens)
        yield Delta(
            delta.token_ids[begin:end],
            delta.text[text],
            delta.logprobs[begin:end],
            delta.finish if end == num_tokens else None,
        )
