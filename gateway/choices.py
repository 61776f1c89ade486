"""All answers to one call: streamed as deltas, or collected in portions, so that other calls can run in between."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType

from baton.errors import InvalidRequest
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, GatewayRequest
from gateway.turn_budget import TurnBudget

MAX_CHOICES = 128
"""The most answers to one call, over all of its prompts; this is OpenAI's limit for `n`."""

ChoiceDelta = tuple[int, Delta]
"""The index of the answer, and the delta."""

MAX_VALUES = 3 * 2**20
"""The most values in one response that is sent whole, over all choices. Each token is a value, and so is each top
log-probability.

One answer may fill a context of 131,072 tokens with 20 log-probabilities each. This costs tens of MiB
(docs/security.md).
"""

PORTION_TOKENS = 128
"""How many tokens are collected at once. If each token has the maximum number of log-probabilities, this takes about a
millisecond."""

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def batches_of(
    driver: RequestDriver, requests: Sequence[GatewayRequest]
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    """Yields batches of the deltas that are available. Each answer's deltas are in order, up to the finish.

    If one answer fails, all answers fail. Closing the generator ends all requests. `prompt_parts` divides deltas with
    log-probabilities of a prompt. Raises InvalidRequest if the caller may never have so many answers at once.
    """
    caller = requests[0].caller
    if caller.max_concurrent is not None and len(requests) > caller.max_concurrent:
        raise InvalidRequest(
            "n",
            f"the call wants {len(requests)} answers at once, but the key of '{caller.name}' allows "
            f"{caller.max_concurrent}; lower n, or send fewer prompts",
        )
    batches = _batches_of(driver, requests)
    has_prompt_logprobs = requests[0].sampling_params.prompt_logprobs is not None
    return _in_prompt_parts(batches) if has_prompt_logprobs else batches


def prompt_parts(delta: Delta) -> Iterator[Delta]:
    """The delta, or parts of it if it has log-probabilities of more than PORTION_TOKENS prompt tokens. Each part has
    the log-probabilities of at most PORTION_TOKENS tokens. The last part also has everything else."""
    logprobs = delta.prompt_logprobs
    if logprobs is None or len(logprobs) <= PORTION_TOKENS:
        yield delta
        return
    last = (len(logprobs) - 1) // PORTION_TOKENS * PORTION_TOKENS
    for begin in range(0, last, PORTION_TOKENS):
        yield Delta(prompt_logprobs=logprobs[begin : begin + PORTION_TOKENS])
    yield replace(delta, prompt_logprobs=logprobs[last:])


async def _in_prompt_parts(
    batches: AsyncGenerator[Sequence[ChoiceDelta], None],
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    """Yields one part of a delta at a time. Other tasks run in between."""
    budget = TurnBudget()
    async with aclosing(batches):
        async for batch in batches:
            for index, delta in batch:
                for part in prompt_parts(delta):
                    yield ((index, part),)
                    await budget.pause_if_spent()


async def _batches_of(
    driver: RequestDriver, requests: Sequence[GatewayRequest]
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    if len(requests) == 1:
        async with aclosing(driver.generate(requests[0])) as deltas:
            async for delta in deltas:
                yield ((0, delta),)
        return
    waiting: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(len(requests))
    tasks = [
        asyncio.create_task(_put_deltas(driver, index, request, waiting))
        for index, request in enumerate(requests)
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


async def _put_deltas(
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


def check_whole_answer(requests: Sequence[GatewayRequest], names: Mapping[str, str] = NO_NAMES) -> None:
    """Raises InvalidRequest if all answers together could contain more than MAX_VALUES values.

    A request without `max_tokens` counts with the whole room after its prompt. `names` maps Baton's names of fields to
    the client's names.
    """
    num_prompt_values = sum(map(_num_prompt_values, requests))
    num_values = sum(map(_num_values, requests)) + num_prompt_values
    if num_values <= MAX_VALUES:
        return
    longest = max(request.sampling_params.max_tokens for request in requests)
    num_top = requests[0].sampling_params.logprobs or 0
    max_tokens, logprobs = (names.get(name, name) for name in ("max_tokens", "logprobs"))
    fitting = (MAX_VALUES - num_prompt_values) // (len(requests) * (1 + num_top))
    if fitting < 1:
        raise InvalidRequest(
            names.get("prompt_logprobs", "prompt_logprobs"),
            f"an answer that is not streamed may hold {MAX_VALUES} values; the log-probabilities of the prompts are "
            f"{num_prompt_values} values. Ask for fewer, lower n, or send fewer or shorter prompts",
        )
    fewer = f"lower {logprobs} or n" if num_top else "lower n"
    raise InvalidRequest(
        max_tokens,
        f"an answer that is not streamed may hold {MAX_VALUES} values; this one may have {num_values}: {len(requests)} "
        f"answers x {longest} tokens x {1 + num_top} values (the token and {num_top} {logprobs})"
        f"{f', and {num_prompt_values} of the prompts' if num_prompt_values else ''}. Set {max_tokens} to "
        f"at most {fitting}, {fewer}, or set stream: true",
    )


def _num_values(request: GatewayRequest) -> int:
    params = request.sampling_params
    return params.max_tokens * (1 + (params.logprobs or 0))


def _num_prompt_values(request: GatewayRequest) -> int:
    num_top = request.sampling_params.prompt_logprobs
    return 0 if num_top is None else len(request.prompt_token_ids) * (1 + num_top)


async def in_turns(batches: AsyncIterator[Sequence[ChoiceDelta]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Yields deltas of at most PORTION_TOKENS tokens, one at a time. Other tasks run in between."""
    budget = TurnBudget()
    async for batch in batches:
        for index, delta in batch:
            for part in answer_parts(delta):
                yield index, part
                await budget.pause_if_spent()


async def in_portions(
    batches: AsyncIterator[Sequence[ChoiceDelta]],
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    """Yields the deltas in batches of at most PORTION_TOKENS tokens. Other tasks run in between. If a client reads
    slowly, thousands of its tokens may be available together."""
    budget = TurnBudget()
    async for batch in batches:
        portion: list[ChoiceDelta] = []
        num_tokens = 0
        for index, delta in batch:
            for part in answer_parts(delta):
                num_tokens += len(part.token_ids)
                if portion and num_tokens > PORTION_TOKENS:
                    yield portion
                    await budget.pause_if_spent()
                    portion, num_tokens = [], len(part.token_ids)
                portion.append((index, part))
        yield portion


def answer_parts(delta: Delta) -> Iterator[Delta]:
    """Splits a delta into parts of at most PORTION_TOKENS tokens. Each part's share of the text is about its share of
    the tokens. The first part has the prompt's log-probabilities, the last part the finish."""
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
            delta.prompt_logprobs if begin == 0 else None,
        )
