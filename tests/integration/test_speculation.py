"""Drafts change no token: whole engines with them and without, over every way that a request can take."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from tests.factories.models import make_tokenizer
from tests.factories.whole_engines import Answer, EnginesOf, WholeEngine, hand_over

NGRAM = {"method": "ngram"}
ROOMY: dict[str, Any] = {"max_num_batched_tokens": 256, "num_blocks": 256}
TIGHT = {**ROOMY, "num_blocks": 40}
"""Too few blocks for sixteen requests at once."""
LIST = StructuredOutput(
    GrammarKind.JSON_SCHEMA,
    '{"type": "array", "items": {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"], '
    '"additionalProperties": false}, "minItems": 3, "maxItems": 4}',
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.5, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 3, "ignore_eos": True},
    {"temperature": 0.0, "repetition_penalty": 1.05, "presence_penalty": 0.1},
    {"temperature": 1.0, "top_p": 0.3, "frequency_penalty": 0.05, "min_tokens": 20},
    {"temperature": 0.0, "logit_bias": {5: 9.0, 6: 8.0, 7: 9.0}},
    {"temperature": 1.0, "logit_bias": {5: 30.0, 6: 30.0}, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 9.0, 2: 7.0}, "min_tokens": 15},
    {"temperature": 0.0, "structured_output": LIST},
    {"temperature": 1.0, "top_k": 3, "structured_output": LIST},
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. " * 3 + "The quick brown",
    'Here is a list: [{"name": "a"}, {"name": "b"}, {"name": "a"}]. Write it again: ',
    "One, two, three, four. One, two, three, four. One, two,",
)
NUM_REQUESTS, NUM_TOKENS = 24, 56


def make_requests() -> list[EngineRequest]:
    tokenizer = make_tokenizer()
    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(tokenizer.encode(TEXTS[i % len(TEXTS)]).ids),
            sampling_params=SamplingParams(max_tokens=NUM_TOKENS - i, seed=i, **PARAMS[i % len(PARAMS)]),
        )
        for i in range(NUM_REQUESTS)
    ]


Answers = Mapping[str, Answer]


def said(engine: WholeEngine) -> Answers:
    """By request; the engine's answers are forgotten."""
    answers, engine.answers = engine.answers, {}
    return answers


def assert_same(answers: Answers, expected: Answers, *, is_whole: bool = True) -> None:
    """`is_whole`: with log-probabilities; else the tokens alone."""
    assert tokens_of(answers) == tokens_of(expected)
    for name, answer in answers.items():
        other = expected[name]
        assert answer.end is not None
        assert other.end is not None
        assert answer.end.finish_reason == other.end.finish_reason
        if is_whole:
            ours, theirs = answer.logprobs, other.logprobs
            assert [(each.token_id, each.rank) for each in ours] == [
                (each.token_id, each.rank) for each in theirs
            ]
            assert [each.logprob for each in ours] == pytest.approx(
                [each.logprob for each in theirs], abs=1e-4
            )


def tokens_of(answers: Answers) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def num_drafts(engine: WholeEngine) -> tuple[int, int]:
    """Verified, and accepted."""
    counters = engine.core.counters()
    return (
        counters.get("spec_decode_num_draft_tokens", 0),
        counters.get("spec_decode_num_accepted_tokens", 0),
    )


def assert_some_were_right_and_some_wrong(engine: WholeEngine) -> None:
    num_verified, num_accepted = num_drafts(engine)
    assert 0 < num_accepted < num_verified


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Without drafts, all at once."""
    with EnginesOf(folder) as engines:
        plain = engines.start("plain", **ROOMY)
        for request in make_requests():
            plain.add(request)
        engines.run()
        assert num_drafts(plain) == (0, 0)
        return said(plain)


@pytest.fixture
def engines(folder: Path) -> Iterator[EnginesOf]:
    with EnginesOf(folder) as engines:
        yield engines


def test_c62_drafts_change_no_token_of_a_request_alone(engines: EnginesOf, expected: Answers) -> None:
    engine = engines.start("drafting", speculation={**NGRAM, "num_speculative_tokens": 8}, **ROOMY)
    answers: dict[str, Answer] = {}
    for request in make_requests():
        engine.add(request)
        engines.run()
        answers |= said(engine)
    assert_same(answers, expected)
    assert_some_were_right_and_some_wrong(engine)


@pytest.mark.parametrize(
    "settings",
    [
        ROOMY,
        {**ROOMY, "block_size": 1, "num_blocks": 4096},
        {**ROOMY, "max_num_batched_tokens": 80},
        {**ROOMY, "batching": "prefill_first"},
        {**ROOMY, "batching": "mixed"},
        {**TIGHT, "preemption": "recompute"},
        {**TIGHT, "preemption": "swap"},
    ],
    ids=["roomy", "blocks of one", "little budget", "two-phase", "mixed", "recompute", "swap"],
)
def test_c62_drafts_change_no_token_of_many_requests_at_once(
    engines: EnginesOf, expected: Answers, settings: dict[str, Any]
) -> None:
    engine = engines.start("drafting", speculation=NGRAM, **settings)
    for request in make_requests():
        engine.add(request)
    engines.run()
    assert_same(said(engine), expected)
    assert_some_were_right_and_some_wrong(engine)
    counters = engine.core.counters()
    assert (counters.get("preemptions", 0) > 0) == (settings.get("num_blocks") == 40)
    assert (counters.get("swapped_in_blocks", 0) > 0) == (settings.get("preemption") == "swap")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c62_drafts_change_no_token_of_requests_that_are_handed_over(
    engines: EnginesOf, expected: Answers, num_ranks: int
) -> None:
    producer = engines.start("producer", speculation=NGRAM, **ROOMY)
    consumer = engines.start("consumer", num_ranks, speculation=NGRAM, **ROOMY)
    for request in make_requests():
        hand_over(producer, consumer, request)
    engines.run()
    assert_same(said(consumer), expected, is_whole=num_ranks == 1)
    assert_some_were_right_and_some_wrong(consumer)
    assert num_drafts(producer) == (0, 0), "a prefill worker samples one token, which was never guessed"


def test_c62_a_migrated_request_goes_on_with_drafts(engines: EnginesOf, expected: Answers) -> None:
    """It continues after the tokens that its client has."""
    engine = engines.start("drafting", speculation=NGRAM, **ROOMY)
    for request in make_requests():
        tokens = expected[request.request_id].token_ids
        engine.add(replace(request, output_token_ids=tuple(tokens[: len(tokens) // 3])))
    engines.run()
    for name, answer in said(engine).items():
        whole = expected[name].token_ids
        assert answer.token_ids == whole[len(whole) // 3 :]
    assert_some_were_right_and_some_wrong(engine)
