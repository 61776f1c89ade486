"""Tokens that a grammar forces are appended at once and change no answer: whole engines, every way of a request."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest, FinishReason
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer
from tests.factories.whole_engines import Answer, EnginesOf, WholeEngine, hand_over

FORCED, PLAIN = {"forced_tokens": True}, {"forced_tokens": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
ROOMY: dict[str, Any] = {"max_num_batched_tokens": 256, "num_blocks": 256}
TIGHT: dict[str, Any] = {**ROOMY, "num_blocks": 40}
"""Too few blocks for sixteen requests at once."""


def object_of(*names: str) -> StructuredOutput:
    """Objects with exactly these names, whose values are short, and no spaces."""
    schema = {
        "type": "object",
        "properties": {name: {"enum": [True, 17, "no"]} for name in names},
        "required": list(names),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))


LONG_NAMES = object_of("identification_number", "street_of_delivery", "is_a_present")
NO_CHOICE = StructuredOutput(GrammarKind.REGEX, "The capital of France is Paris, and it lies on the Seine")
LETTER_N = make_tokenizer().encode("n").ids[0]
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "structured_output": LONG_NAMES},
    {"temperature": 1.0, "structured_output": LONG_NAMES},
    {"temperature": 0.0, "structured_output": NO_CHOICE},
    {"temperature": 1.0},
    {"temperature": 0.0, "structured_output": LONG_NAMES, "logprobs": 2},
    {
        "temperature": 0.0,
        "structured_output": LONG_NAMES,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
    },
    {"temperature": 1.0, "structured_output": LONG_NAMES, "top_p": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.0, "structured_output": LONG_NAMES, "stop_token_ids": (LETTER_N,)},
    {"temperature": 1.0, "structured_output": LONG_NAMES, "logit_bias": {5: 2.0, LETTER_N: -100.0}},
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. " * 3,
    'Objects look like this: {"identification_number":17,"street_of_delivery":"no","is_a_present":true}. One more: ',
)
NUM_REQUESTS = 18


def make_requests() -> list[EngineRequest]:
    """Some end in the middle of a forced run, since all their tokens are used up."""
    tokenizer = make_tokenizer()
    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(tokenizer.encode(TEXTS[i % len(TEXTS)]).ids),
            sampling_params=SamplingParams(
                max_tokens=24 if i % 4 == 3 else 96, seed=i, **PARAMS[i % len(PARAMS)]
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


@dataclass(frozen=True)
class Said:
    """What an engine answered."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    ranks: list[int]
    logprobs: object


def said(engine: WholeEngine) -> dict[str, Said]:
    """By request; the answers are forgotten."""
    answers, engine.answers = engine.answers, {}
    return {name: _said(answer) for name, answer in answers.items()}


def _said(answer: Answer) -> Said:
    assert answer.end is not None
    if answer.logprobs:
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
    ranks, logprobs = [each.rank for each in answer.logprobs], [each.logprob for each in answer.logprobs]
    return Said(answer.token_ids, answer.end.finish_reason, ranks, logprobs)


def num_forced(engine: WholeEngine) -> int:
    return engine.core.counters().get("forced_tokens", 0)


def num_steps(engine: WholeEngine) -> int:
    return sum(engine.core.steps.tokens.counts().num_in)


def run_all(engines: EnginesOf, engine: WholeEngine) -> dict[str, Said]:
    for request in make_requests():
        engine.add(request)
    engines.run()
    return said(engine)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Said]:
    """Each token sampled in a step of its own."""
    with EnginesOf(folder) as engines:
        plain = engines.start("plain", speculation=PLAIN, **ROOMY)
        answers = run_all(engines, plain)
        assert num_forced(plain) == 0
        return {
            name: replace(each, logprobs=pytest.approx(each.logprobs, abs=1e-3))
            for name, each in answers.items()
        }


@pytest.fixture
def engines(folder: Path) -> Iterator[EnginesOf]:
    with EnginesOf(folder) as engines:
        yield engines


def test_c64_forced_tokens_are_those_of_the_tokenizer_and_the_text_fits_its_grammar(
    expected: dict[str, Said],
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
    engines: EnginesOf, expected: dict[str, Said]
) -> None:
    engine = engines.start("forced", speculation=FORCED, **ROOMY)
    for request in make_requests():
        before, forced_before = num_steps(engine), num_forced(engine)
        engine.add(request)
        engines.run()
        while engine.core.may_progress:  # a step that was planned past the end
            engine.note(engine.core.step())
        answer = said(engine)[request.request_id]
        assert answer == expected[request.request_id]
        taken, num_tokens, p = (
            num_forced(engine) - forced_before,
            len(answer.token_ids),
            request.sampling_params,
        )
        is_planned_past = False
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
    engine.add(EngineRequest(request_id="r", prompt_token_ids=prompt, sampling_params=params))
    engines.run()
    answer = engine.answers["r"]
    assert answer.token_ids == [*make_tokenizer().encode(NO_CHOICE.source).ids, EOS_TOKEN_ID]
    assert answer.end is not None
    assert answer.end.finish_reason is FinishReason.STOP
    assert num_steps(engine) == 1


@pytest.mark.parametrize(
    "settings",
    [
        ROOMY,
        {**ROOMY, "block_size": 1, "num_blocks": 4096},
        {**ROOMY, "max_num_batched_tokens": 20},
        {**ROOMY, "batching": "prefill_first"},
        {**ROOMY, "batching": "mixed"},
        {**TIGHT, "preemption": "recompute"},
        {**TIGHT, "preemption": "swap"},
    ],
    ids=["roomy", "blocks of one", "little budget", "two-phase", "mixed", "recompute", "swap"],
)
@pytest.mark.parametrize("speculation", [FORCED, NGRAM], ids=["alone", "with drafts"])
def test_c64_forced_tokens_change_no_answer_of_many_requests_at_once(
    engines: EnginesOf, expected: dict[str, Said], settings: dict[str, Any], speculation: dict[str, Any]
) -> None:
    engine = engines.start("forced", speculation=speculation, **settings)
    assert run_all(engines, engine) == expected
    counters = engine.core.counters()
    assert counters["forced_tokens"] > 200
    assert (counters.get("preemptions", 0) > 0) == (settings.get("num_blocks") == 40)
    assert (counters.get("swapped_in_blocks", 0) > 0) == (settings.get("preemption") == "swap")
    assert (counters.get("spec_decode_num_accepted_tokens", 0) > 0) == (speculation is NGRAM)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c64_forced_tokens_change_no_answer_that_is_handed_over(
    engines: EnginesOf, expected: dict[str, Said], num_ranks: int
) -> None:
    producer = engines.start("producer", speculation=FORCED, **ROOMY)
    consumer = engines.start("consumer", num_ranks, speculation=FORCED, **ROOMY)
    for request in make_requests():
        hand_over(producer, consumer, request)
    engines.run()
    for name, answer in said(consumer).items():
        assert answer.token_ids == expected[name].token_ids
    assert num_forced(consumer) > 200
    assert num_forced(producer) == 0, "a prefill worker's request ends with the token that it samples"


def test_c64_a_request_continues_in_the_middle_of_a_forced_run(
    engines: EnginesOf, expected: dict[str, Said]
) -> None:
    """It was migrated: its client has some of its tokens."""
    engine = engines.start("forced", speculation=FORCED, **ROOMY)
    for request in make_requests():
        tokens = expected[request.request_id].token_ids
        engine.add(replace(request, output_token_ids=tuple(tokens[: len(tokens) // 3])))
    engines.run()
    for name, answer in said(engine).items():
        whole = expected[name].token_ids
        assert answer.token_ids == whole[len(whole) // 3 :]
    assert num_forced(engine) > 100


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_c64_forced_tokens_are_taken_on_a_cpu_unless_the_configuration_says_otherwise(
    engines: EnginesOf, expected: dict[str, Said], async_scheduling: bool
) -> None:
    engine = engines.start("engine", async_scheduling=async_scheduling, **ROOMY)
    assert run_all(engines, engine) == expected
    assert num_forced(engine) > 200
