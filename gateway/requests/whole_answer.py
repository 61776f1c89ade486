"""Whole answers: how much an answer may hold that is collected and sent at its end, and not streamed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from types import MappingProxyType

from baton.errors import InvalidRequest
from gateway.requests.choices import ChoiceDelta
from gateway.requests.client_request import Delta
from gateway.requests.run import Generation
from gateway.requests.turn_budget import TurnBudget

MAX_VALUES = 3 * 2**20
"""Of one whole answer, over all of its choices: a token is a value, and so is each of the likeliest ones beside it.

So that one answer may fill a context of 131,072 tokens with 20 log-probabilities each. That costs tens of MiB
(benchmarks/whole_answers.py).
"""

PORTION_TOKENS = 128
"""Collected at once: with all their log-probabilities about a millisecond's work."""

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def check_whole_answer(generations: Sequence[Generation], names: Mapping[str, str] = NO_NAMES) -> None:
    """InvalidRequest if the answers together could hold more than MAX_VALUES. Without `max_tokens` an answer may fill
    the room behind its prompt, so that counts. `names`: what the client calls fields that we call otherwise."""
    num_values = sum(map(_num_values, generations))
    if num_values <= MAX_VALUES:
        return
    longest = max(generation.sampling_params.max_tokens for generation in generations)
    num_top = generations[0].sampling_params.logprobs or 0
    max_tokens, logprobs = (names.get(name, name) for name in ("max_tokens", "logprobs"))
    fitting = MAX_VALUES // (len(generations) * (1 + num_top))
    fewer = f"lower {logprobs} or n" if num_top else "lower n"
    raise InvalidRequest(
        max_tokens,
        f"{longest} tokens x {1 + num_top} values each (the token, {num_top} {logprobs}) x {len(generations)} answers "
        f"are {num_values} values; an answer that is not streamed may hold {MAX_VALUES}. Set {max_tokens} to at most "
        f"{fitting}, {fewer}, or set stream: true",
    )


def _num_values(generation: Generation) -> int:
    params = generation.sampling_params
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
    """The text comes with the first one, the finish with the last."""
    if len(delta.token_ids) <= PORTION_TOKENS:
        yield delta
        return
    for begin in range(0, len(delta.token_ids), PORTION_TOKENS):
        end = begin + PORTION_TOKENS
        yield Delta(
            delta.token_ids[begin:end],
            "" if begin else delta.text,
            delta.logprobs[begin:end],
            delta.finish if end >= len(delta.token_ids) else None,
        )
