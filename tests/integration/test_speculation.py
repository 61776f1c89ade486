"""Drafts change no token: whole engines with them and without, over every way that a request can take."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest, FinishReason
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from tests.factories.models import make_tokenizer
from tests.factories.speculation import (
    NGRAM,
    PLAIN,
    REPEATING,
    ROOMY,
    SCHEDULERS,
    Answers,
    ask,
    ask_one_by_one,
    assert_preempted_as,
    assert_rest,
    assert_same,
    assert_some_were_right_and_some_wrong,
    begun,
    drafts_of,
    num_drafts,
)
from tests.factories.whole_engines import EnginesOf, hand_over

pytestmark = pytest.mark.usefixtures("forked_workers")

NUM_REQUESTS = 24


def make_requests() -> list[EngineRequest]:
    return REPEATING.requests(NUM_REQUESTS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Without drafts, all at once."""
    with EnginesOf(folder) as engines:
        plain = engines.start("plain", speculation=PLAIN, **ROOMY)
        answers = ask(engines, plain, make_requests())
        assert num_drafts(plain) == drafts_of(answers) == (0, 0)
        return answers


def test_c62_drafts_change_no_token_of_a_request_alone(engines: EnginesOf, expected: Answers) -> None:
    engine = engines.start("drafting", speculation={**NGRAM, "num_speculative_tokens": 8}, **ROOMY)
    answers = ask_one_by_one(engines, engine, make_requests())
    assert_same(answers, expected)
    assert_some_were_right_and_some_wrong(engine, answers)


@pytest.mark.parametrize("settings", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_c62_drafts_change_no_token_of_many_requests_at_once(
    engines: EnginesOf, expected: Answers, settings: dict[str, Any]
) -> None:
    engine = engines.start("drafting", speculation=NGRAM, **settings)
    answers = ask(engines, engine, make_requests())
    assert_same(answers, expected)
    assert_some_were_right_and_some_wrong(engine, answers)
    assert_preempted_as(settings, engine)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c62_drafts_change_no_token_of_requests_that_are_handed_over(
    engines: EnginesOf, expected: Answers, num_ranks: int
) -> None:
    producer = engines.start("producer", speculation=NGRAM, **ROOMY)
    consumer = engines.start("consumer", num_ranks, speculation=NGRAM, **ROOMY)
    for request in make_requests():
        hand_over(producer, consumer, request)
    engines.run()
    answers = consumer.take_answers()
    assert_same(answers, expected, is_whole=num_ranks == 1)
    assert_some_were_right_and_some_wrong(consumer, answers)
    assert num_drafts(producer) == (0, 0), "a prefill worker samples one token, which was never guessed"


def test_c62_a_migrated_request_goes_on_with_drafts(engines: EnginesOf, expected: Answers) -> None:
    """It continues after the tokens that its client has."""
    engine = engines.start("drafting", speculation=NGRAM, **ROOMY)
    answers = ask(engines, engine, begun(make_requests(), expected))
    assert_rest(answers, expected)
    assert_some_were_right_and_some_wrong(engine, answers)


def test_c62_a_hand_over_costs_no_right_draft(engines: EnginesOf, expected: Answers) -> None:
    """D has the same drafts as an engine that continues after token 0, and as many as an engine that computes the
    whole request. Only the step of token 1 has no drafts on D, since drafts are guessed at the end of a step."""
    producer, consumer, alone = (
        engines.start(name, speculation=NGRAM, **ROOMY) for name in ("producer", "consumer", "alone")
    )
    num_right = 0
    for request in make_requests()[: len(REPEATING.params)]:
        first, *others = expected[request.request_id].token_ids
        if not others:
            continue
        hand_over(producer, consumer, request)
        engines.run()
        handed_over = consumer.take_answers()
        behind = ask(engines, alone, [replace(request, output_token_ids=(first,))])
        assert drafts_of(handed_over) == drafts_of(behind), request.request_id
        whole = ask(engines, alone, [request])
        assert drafts_of(handed_over) == pytest.approx(drafts_of(whole), abs=1), request.request_id
        num_right += drafts_of(handed_over)[1]
    assert num_right > 50


def test_c62_a_wrong_draft_may_lead_to_a_dead_end_of_the_grammar(engines: EnginesOf) -> None:
    """The grammar allows " no", but nothing after it. This ends only an answer for which this draft is right."""
    tokenizer = make_tokenizer()
    grammar = StructuredOutput(GrammarKind.LARK, 'start: "a" (" no" end | " yes")\nend: end "x"')
    a, yes, no = (tokenizer.encode(text).ids for text in ("a", " yes", " no"))
    requests = [
        EngineRequest(
            request_id=tokenizer.decode(preferred),
            prompt_token_ids=(*a, *no, *a, *no),
            sampling_params=SamplingParams(
                temperature=0.0, structured_output=grammar, logit_bias=dict.fromkeys(preferred, 90.0)
            ),
        )
        for preferred in (yes, no)
    ]
    plain = engines.start("plain", speculation=PLAIN, **ROOMY)
    drafting = engines.start("drafting", speculation={**PLAIN, **NGRAM, "prompt_lookup_min": 1}, **ROOMY)
    expected, answers = ask(engines, plain, requests), ask_one_by_one(engines, drafting, requests)
    assert_same(answers, expected)
    assert tokenizer.decode(answers[" yes"].token_ids) == "a yes"
    assert answers[" no"].finish_reason is FinishReason.ERROR
    assert num_drafts(drafting)[0] > 0
