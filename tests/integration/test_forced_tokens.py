"""Tokens that a grammar forces are appended at once and change no answer: whole engines, every way of a request."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest, FinishReason
from baton.sampling import SamplingParams
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer
from tests.factories.speculation import (
    FORCED,
    FORCING,
    LONG_NAMES,
    NGRAM,
    NO_CHOICE,
    PLAIN,
    ROOMY,
    SCHEDULERS,
    Answers,
    ask,
    assert_preempted_as,
    assert_rest,
    assert_same,
    begun,
    num_drafts,
    num_forced,
)
from tests.factories.whole_engines import EnginesOf, WholeEngine, hand_over

NUM_REQUESTS = 18


def make_requests() -> list[EngineRequest]:
    return FORCING.requests(NUM_REQUESTS)


def num_steps(engine: WholeEngine) -> int:
    return sum(engine.core.steps.tokens.counts().num_in)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """The answers if each token is sampled in a step of its own."""
    with EnginesOf(folder) as engines:
        plain = engines.start("plain", speculation=PLAIN, **ROOMY)
        answers = ask(engines, plain, make_requests())
        assert num_forced(plain) == 0
        return answers


def test_c64_forced_tokens_are_those_of_the_tokenizer_and_the_text_fits_its_grammar(
    expected: Answers,
) -> None:
    tokenizer, endings = make_tokenizer(), set()
    for request in make_requests():
        answer, params = expected[request.request_id], request.sampling_params
        tokens = answer.token_ids
        endings.add((params.structured_output is None, bool(params.stop_token_ids), answer.finish_reason))
        text = tokenizer.decode(tokens)
        if params.structured_output is NO_CHOICE and len(tokens) < params.max_tokens:
            assert tokens == [*tokenizer.encode(NO_CHOICE.source).ids, EOS_TOKEN_ID]
        if params.structured_output is LONG_NAMES and tokens[-1] == EOS_TOKEN_ID:
            assert set(json.loads(text)) == {"identification_number", "street_of_delivery", "is_a_present"}
            for name in json.loads(text):
                run = tokenizer.encode(name).ids[:-1]
                assert any(tokens[i : i + len(run)] == run for i in range(len(tokens))), name
    assert endings >= {(False, False, FinishReason.STOP), (False, True, FinishReason.STOP)}
    assert (False, False, FinishReason.LENGTH) in endings, "in the middle of an object"


def test_c64_forced_tokens_of_a_request_alone_take_no_step_of_their_own(
    engines: EnginesOf, expected: Answers
) -> None:
    engine = engines.start("forced", speculation=FORCED, **ROOMY)
    for request in make_requests():
        before, forced_before = num_steps(engine), num_forced(engine)
        answers = ask(engines, engine, [request])
        while engine.core.may_progress:  # a step that was planned past the end
            engine.note(engine.core.step())
        assert_same(answers, {request.request_id: expected[request.request_id]})
        answer = answers[request.request_id]
        num_tokens, taken = len(answer.token_ids), num_forced(engine) - forced_before
        p, is_planned_past = request.sampling_params, False
        if p.structured_output is None or p.logprobs is not None:
            assert taken == 0
            is_planned_past = answer.finish_reason is FinishReason.STOP
        else:
            assert taken >= num_tokens // 2
        num_sampled = num_tokens - taken
        assert num_steps(engine) - before == num_sampled + is_planned_past, "one for each sampled token"


def test_c64_a_text_without_a_choice_takes_one_step_and_its_end_comes_with_it(engines: EnginesOf) -> None:
    engine = engines.start("forced", speculation=FORCED, **ROOMY)
    prompt = tuple(make_tokenizer().encode("Where is it? ").ids)
    params = SamplingParams(max_tokens=96, temperature=0.0, structured_output=NO_CHOICE)
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, sampling_params=params)
    answer = ask(engines, engine, [request])["r"]
    assert answer.token_ids == [*make_tokenizer().encode(NO_CHOICE.source).ids, EOS_TOKEN_ID]
    assert answer.finish_reason is FinishReason.STOP
    assert num_steps(engine) == 1


LITTLE = {**ROOMY, "max_num_batched_tokens": 20}
"""Less than the longest forced runs."""


@pytest.mark.parametrize("settings", (SCHEDULERS | {"little budget": LITTLE}).values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("speculation", [FORCED, NGRAM], ids=["alone", "with drafts"])
def test_c64_forced_tokens_change_no_answer_of_many_requests_at_once(
    engines: EnginesOf, expected: Answers, settings: dict[str, Any], speculation: dict[str, Any]
) -> None:
    engine = engines.start("forced", speculation=speculation, **settings)
    assert_same(ask(engines, engine, make_requests()), expected)
    assert num_forced(engine) > 200
    assert_preempted_as(settings, engine)
    assert (num_drafts(engine)[1] > 0) == (speculation is NGRAM)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c64_forced_tokens_change_no_answer_that_is_handed_over(
    engines: EnginesOf, expected: Answers, num_ranks: int
) -> None:
    producer = engines.start("producer", speculation=FORCED, **ROOMY)
    consumer = engines.start("consumer", num_ranks, speculation=FORCED, **ROOMY)
    for request in make_requests():
        hand_over(producer, consumer, request)
    engines.run()
    for name, answer in consumer.take_answers().items():
        assert answer.token_ids == expected[name].token_ids
    assert num_forced(consumer) > 200
    assert num_forced(producer) == 0, "a prefill worker's request ends with the token that it samples"


def test_c64_a_request_continues_in_the_middle_of_a_forced_run(engines: EnginesOf, expected: Answers) -> None:
    engine = engines.start("forced", speculation=FORCED, **ROOMY)
    assert_rest(ask(engines, engine, begun(make_requests(), expected)), expected)
    assert num_forced(engine) > 100


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_c64_forced_tokens_are_taken_on_a_cpu_unless_the_configuration_says_otherwise(
    engines: EnginesOf, expected: Answers, async_scheduling: bool
) -> None:
    engine = engines.start("engine", async_scheduling=async_scheduling, **ROOMY)
    assert_same(ask(engines, engine, make_requests()), expected)
    assert num_forced(engine) > 200
