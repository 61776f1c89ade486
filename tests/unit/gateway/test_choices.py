"""An answer that is not streamed: how much it may hold, and in which portions it is collected."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.request import PackedLogprobs, TokenLogprobs
from baton.sampling import SamplingParams
from gateway.auth.callers import Caller
from gateway.choices import (
    MAX_VALUES,
    PORTION_TOKENS,
    ChoiceDelta,
    batches_of,
    check_whole_answer,
    in_portions,
    in_turns,
    prompt_parts,
)
from gateway.requests.request import Delta, GatewayRequest
from gateway.text import TextStream
from gateway.turn_budget import TURN_S
from tests.factories.answers import Answering, WorkClock, batches_from, finish_of
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()


def asked(
    num_answers: int,
    max_tokens: int,
    logprobs: int | None = None,
    prompt: tuple[int, ...] = (5,),
    prompt_logprobs: int | None = None,
) -> list[GatewayRequest]:
    generation = GatewayRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        ),
        text=TextStream(TOKENIZER, (), 0, True),
    )
    return [generation] * num_answers


@pytest.mark.parametrize(
    ("num_answers", "logprobs"), [(1, None), (1, 0), (1, 20), (128, None), (128, 20), (7, 5)]
)
def test_as_much_as_fits_is_allowed_and_no_token_more(num_answers: int, logprobs: int | None) -> None:
    fitting = MAX_VALUES // (num_answers * (1 + (logprobs or 0)))
    check_whole_answer(asked(num_answers, fitting, logprobs))
    with pytest.raises(InvalidRequest, match=f"max_tokens to at most {fitting},") as caught:
        check_whole_answer(asked(num_answers, fitting + 1, logprobs))
    assert caught.value.field == "max_tokens"


def test_more_answers_than_a_key_ever_allows_are_refused_for_good() -> None:
    """With a 429, clients would send the call again and again."""
    caller = Caller("alice", max_concurrent=2)
    requests = [replace(each, caller=caller) for each in asked(3, 5)]
    driver: Any = Answering([])
    with pytest.raises(InvalidRequest, match=r"^n: the call wants 3 answers .* 'alice' allows 2; lower n"):
        batches_of(driver, requests)
    batches_of(driver, requests[:2])


def test_an_answer_that_fills_a_long_context_is_allowed() -> None:
    check_whole_answer(asked(1, 1_000_000))
    check_whole_answer(asked(24, 131_072))
    check_whole_answer(asked(1, 131_072, 20))


def test_too_large_an_answer_is_refused_with_numbers_and_remedies_in_the_clients_terms() -> None:
    names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
    with pytest.raises(InvalidRequest) as caught:
        check_whole_answer(asked(128, 1_500, 20), names)
    assert str(caught.value) == (
        "max_completion_tokens: an answer that is not streamed may hold 3145728 values; this one may have 4032000: 128 "
        "answers x 1500 tokens x 21 values (the token and 20 top_logprobs). Set max_completion_tokens to at most 1170, "
        "lower top_logprobs or n, or set stream: true"
    )


def test_answers_to_prompts_of_many_lengths_are_added_up() -> None:
    check_whole_answer(asked(1, MAX_VALUES - 10) + asked(1, 10))
    with pytest.raises(InvalidRequest, match=f"this one may have {MAX_VALUES + 1}: "):
        check_whole_answer(asked(1, MAX_VALUES - 10) + asked(1, 11))


def test_log_probabilities_of_prompts_count_too() -> None:
    prompt = (5,) * 2**16
    num_values = 10 * 4 * 2**16
    fitting = (MAX_VALUES - num_values) // 10
    check_whole_answer(asked(10, fitting, prompt=prompt, prompt_logprobs=3))
    with pytest.raises(
        InvalidRequest, match=rf"\), and {num_values} of the prompts. Set max_tokens to at most {fitting},"
    ):
        check_whole_answer(asked(10, fitting + 1, prompt=prompt, prompt_logprobs=3))
    with pytest.raises(InvalidRequest) as caught:
        check_whole_answer(asked(13, 1, prompt=prompt, prompt_logprobs=3), {"prompt_logprobs": "logprobs"})
    assert str(caught.value) == (
        "logprobs: an answer that is not streamed may hold 3145728 values; the log-probabilities of the prompts are "
        "3407872 values. Ask for fewer, lower n, or send fewer or shorter prompts"
    )


@pytest.mark.parametrize("num_positions", [0, 1, PORTION_TOKENS, PORTION_TOKENS + 1, 5 * PORTION_TOKENS])
def test_log_probabilities_of_a_prompt_come_in_parts_before_the_rest_of_their_delta(
    num_positions: int,
) -> None:
    logprobs = PackedLogprobs.of(TokenLogprobs(position, -0.5, 1, ()) for position in range(num_positions))
    delta = Delta((7,), "text", prompt_logprobs=logprobs)
    *before, last = prompt_parts(delta)
    assert replace(last, prompt_logprobs=logprobs) == delta
    parts = [part.prompt_logprobs or () for part in (*before, last)]
    assert [each for part in parts for each in part] == [*logprobs]
    assert max(map(len, parts)) <= PORTION_TOKENS
    assert [replace(part, prompt_logprobs=None) for part in before] == [Delta()] * len(before)
    assert [*prompt_parts(Delta((7,)))] == [Delta((7,))]


def test_between_these_parts_others_run() -> None:
    logprobs = PackedLogprobs.of(TokenLogprobs(at, -0.5, 1, ()) for at in range(20 * PORTION_TOKENS))
    first = Delta((7,), prompt_logprobs=logprobs)
    deltas = [first, Delta((8,), finish=finish_of())]
    driver: Any = Answering(deltas)
    for number in (1, 2):
        clock = WorkClock()

        async def run(clock: WorkClock = clock, number: int = number) -> list[tuple[int, Delta]]:
            taken = []
            async with aclosing(batches_of(driver, asked(number, 2, prompt_logprobs=0))) as batches:
                async for batch in batches:
                    for index, delta in batch:
                        clock.work(len(delta.prompt_logprobs or ()) * TURN_S / PORTION_TOKENS)
                        taken.append((index, delta))
            return taken

        taken = clock.run(run())
        for answer in range(number):
            own = [delta for index, delta in taken if index == answer]
            assert own == [*prompt_parts(first), deltas[1]]
        assert clock.longest_turn_s < 2 * TURN_S


def test_a_long_delta_is_collected_in_portions_and_others_run_in_between() -> None:
    token_ids = tuple(range(3 * PORTION_TOKENS + 5))
    logprobs = tuple(TokenLogprobs(token_id, -0.5, 1, ()) for token_id in token_ids)
    deltas = [Delta(token_ids, "some text", logprobs), *[Delta((1,), "a")] * PORTION_TOKENS]
    deltas.append(Delta(token_ids, "the end", finish=finish_of()))
    clock = WorkClock()

    async def run() -> list[tuple[int, Delta]]:
        taken = []
        async for index, delta in in_turns(batches_from(deltas, 3)):
            clock.work(len(delta.token_ids) * TURN_S / PORTION_TOKENS)
            taken.append((index, delta))
        return taken

    taken = clock.run(run())
    assert {index for index, _ in taken} == {3}
    parts = [delta for _, delta in taken]
    assert [token_id for part in parts for token_id in part.token_ids] == [
        token_id for delta in deltas for token_id in delta.token_ids
    ]
    assert tuple(each for part in parts for each in part.logprobs) == logprobs
    assert "".join(part.text for part in parts) == "some text" + "a" * PORTION_TOKENS + "the end"
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + [deltas[-1].finish]
    assert max(len(part.token_ids) for part in parts) == PORTION_TOKENS
    assert clock.longest_turn_s < 2 * TURN_S


async def test_portions_of_a_stream_have_all_that_is_available_together_but_not_too_many_tokens() -> None:
    def delta(num_tokens: int) -> Delta:
        return Delta(tuple(range(num_tokens)), "a" * num_tokens)

    half = PORTION_TOKENS // 2
    together = [
        (0, delta(half)),
        (1, delta(half)),
        (0, delta(1)),
        (1, delta(3 * PORTION_TOKENS)),
        (2, Delta()),
    ]

    async def batches() -> AsyncIterator[list[ChoiceDelta]]:
        yield together
        yield [(0, Delta(finish=finish_of()))]

    portions = [portion async for portion in in_portions(batches())]
    sizes = [[(index, len(each.token_ids)) for index, each in portion] for portion in portions]
    whole = [(1, PORTION_TOKENS)]
    assert sizes == [[(0, half), (1, half)], [(0, 1)], whole, whole, [*whole, (2, 0)], [(0, 0)]]
    assert "".join(each.text for portion in portions for _, each in portion) == "a" * (4 * PORTION_TOKENS + 1)
