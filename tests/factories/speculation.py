"""Requests whose next tokens can be guessed, or that a grammar forces, and their answers by whole engines."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.request import EngineRequest
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from tests.factories.models import make_tokenizer
from tests.factories.whole_engines import Answer, EnginesOf, WholeEngine

# sections `speculation` of the configuration
PLAIN: dict[str, Any] = {"method": "off", "forced_tokens": False}
"""Each token is sampled in its own step."""
NGRAM: dict[str, Any] = {"method": "ngram"}
FORCED: dict[str, Any] = {"forced_tokens": True}

# sections `scheduler`
ROOMY: dict[str, Any] = {"max_num_batched_tokens": 256, "num_blocks": 256}
TIGHT: dict[str, Any] = {**ROOMY, "num_blocks": 40}
"""Too few blocks for sixteen requests at once."""
SCHEDULERS: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "blocks of one": {**ROOMY, "block_size": 1, "num_blocks": 4096},
    "little budget": {**ROOMY, "max_num_batched_tokens": 80},
    "two-phase": {**ROOMY, "batching": "prefill_first"},
    "mixed": {**ROOMY, "batching": "mixed"},
    "recompute": {**TIGHT, "preemption": "recompute"},
    "swap": {**TIGHT, "preemption": "swap"},
}


def object_of(*names: str) -> StructuredOutput:
    """JSON objects with exactly these names, short values, and no spaces. Gateways refuse a JSON schema that says how
    JSON is spaced, so this is a Lark grammar."""
    schema = {
        "type": "object",
        "properties": {name: {"enum": [True, 17, "no"]} for name in names},
        "required": list(names),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    return StructuredOutput(GrammarKind.LARK, f"%llguidance {{}}\nstart: %json {json.dumps(schema)}\n")


LIST = StructuredOutput(
    GrammarKind.JSON_SCHEMA,
    '{"type": "array", "items": {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"], '
    '"additionalProperties": false}, "minItems": 3, "maxItems": 4}',
)
LONG_NAMES = object_of("identification_number", "street_of_delivery", "is_a_present")
NO_CHOICE = StructuredOutput(GrammarKind.REGEX, "The capital of France is Paris, and it lies on the Seine")
LETTER_N = make_tokenizer().encode("n").ids[0]


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts, sampling parameters and limits.

    The n-th request has the n-th of each, and they repeat from the first.
    """

    texts: tuple[str, ...]
    params: tuple[dict[str, Any], ...]
    max_tokens: tuple[int, ...]

    def requests(self, number: int) -> list[EngineRequest]:
        """Requests with their own seeds. When the parameters repeat, texts begin one character later."""
        tokenizer, turns = make_tokenizer(), [divmod(i, len(self.params)) for i in range(number)]
        return [
            EngineRequest(
                request_id=f"r{i}",
                prompt_token_ids=tuple(tokenizer.encode(self.texts[i % len(self.texts)][turn:]).ids),
                sampling_params=SamplingParams(
                    max_tokens=self.max_tokens[i % len(self.max_tokens)], seed=i, **self.params[kind]
                ),
            )
            for i, (turn, kind) in enumerate(turns)
        ]


REPEATING = Workload(
    texts=(
        "The quick brown fox jumps over the lazy dog. " * 3 + "The quick brown",
        'Here is a list: [{"name": "a"}, {"name": "b"}, {"name": "a"}]. Write it again: ',
        "One, two, three, four. One, two, three, four. One, two,",
    ),
    params=(
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
    ),
    max_tokens=tuple(range(56, 32, -1)),
)
"""Requests whose answers repeat their prompts or themselves."""

FORCING = Workload(
    texts=(
        "The quick brown fox jumps over the lazy dog. " * 3,
        'Objects look like this: {"identification_number":17,"street_of_delivery":"no","is_a_present":true}. '
        "One more: ",
    ),
    params=(
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
    ),
    max_tokens=(96, 96, 96, 24),
)
"""Requests with grammars that force most of the tokens. Some reach their limit of tokens within a forced
run."""

Answers = Mapping[str, Answer]


def ask(engines: EnginesOf, engine: WholeEngine, requests: Iterable[EngineRequest]) -> Answers:
    """Runs all requests at once; returns their answers by request."""
    for request in requests:
        engine.add(request)
    engines.run()
    return engine.take_answers()


def ask_one_by_one(engines: EnginesOf, engine: WholeEngine, requests: Iterable[EngineRequest]) -> Answers:
    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= ask(engines, engine, [request])
    return answers


def begun(requests: Iterable[EngineRequest], answers: Answers) -> list[EngineRequest]:
    """The requests with the first third of their answers, as their clients have it after a migration."""
    return [replace(each, output_token_ids=tuple(_thirds(answers[each.request_id])[0])) for each in requests]


def assert_rest(answers: Answers, expected: Answers) -> None:
    """Checks the answers to requests from `begun`."""
    assert tokens_of(answers) == {name: _thirds(expected[name])[1] for name in answers}


def _thirds(answer: Answer) -> tuple[list[int], list[int]]:
    """The first third of an answer's tokens, and the others."""
    at = len(answer.token_ids) // 3
    return answer.token_ids[:at], answer.token_ids[at:]


def assert_same(answers: Answers, expected: Answers, *, is_whole: bool = True) -> None:
    """Compares tokens and log-probabilities; with `is_whole` False, only tokens."""
    assert tokens_of(answers) == tokens_of(expected)
    for name, answer in answers.items():
        assert answer.finish_reason == expected[name].finish_reason
        if is_whole:
            ours, theirs = answer.logprobs, expected[name].logprobs
            assert [each.token_id for each in ours] == (answer.token_ids if ours else [])
            assert [(each.token_id, each.rank) for each in ours] == [
                (each.token_id, each.rank) for each in theirs
            ]
            assert [each.logprob for each in ours] == pytest.approx(
                [each.logprob for each in theirs], abs=1e-4
            )


def tokens_of(answers: Answers) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def num_forced(engine: WholeEngine) -> int:
    return engine.core.counters().get("forced_tokens", 0)


def num_drafts(engine: WholeEngine) -> tuple[int, int]:
    """The numbers of verified and of accepted drafts."""
    counters = engine.core.counters()
    return (
        counters.get("spec_decode_num_draft_tokens", 0),
        counters.get("spec_decode_num_accepted_tokens", 0),
    )


def drafts_of(answers: Answers) -> tuple[int, int]:
    """The numbers of verified and of accepted drafts, from the answers' outputs."""
    outputs = [output for answer in answers.values() for output in answer.outputs]
    return sum(each.num_draft_tokens for each in outputs), sum(
        each.num_accepted_draft_tokens for each in outputs
    )


def assert_some_were_right_and_some_wrong(engine: WholeEngine, answers: Answers) -> None:
    """Checks that drafts were right and wrong, and that the engine and its outputs count alike."""
    num_verified, num_accepted = num_drafts(engine)
    assert 0 < num_accepted < num_verified
    assert drafts_of(answers) == (num_verified, num_accepted)


def assert_preempted_as(settings: Mapping[str, Any], engine: WholeEngine) -> None:
    """Checks that requests were preempted if blocks are few, and returned as the settings say."""
    counters = engine.core.counters()
    assert (counters.get("preemptions", 0) > 0) == (settings.get("num_blocks") == TIGHT["num_blocks"])
    assert (counters.get("swapped_in_blocks", 0) > 0) == (settings.get("preemption") == "swap")
