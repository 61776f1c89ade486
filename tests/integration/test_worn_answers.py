"""Answers that run while their compiled grammar reaches a limit of the library."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from baton.request import EngineRequest, ErrorKind
from baton.sampling import GrammarKind, SamplingParams, StructuredOutput
from engine.grammars.library import Compiled, GrammarLibrary
from tests.factories.speculation import FORCED, NGRAM, PLAIN, ROOMY, ask, tokens_of
from tests.factories.whole_engines import EnginesOf, WholeEngine

WORDS = StructuredOutput(GrammarKind.REGEX, "([a-z ]*x.{12}){4}")
MAX_STATES = 150
"""Enough states of the automaton for each answer alone, but not for all of them together."""
SPECULATIONS = {"plain": PLAIN, "drafts": NGRAM, "forced tokens": FORCED}


def make_requests(number: int = 8) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"r{seed}",
            prompt_token_ids=(5, 6, 7),
            sampling_params=SamplingParams(max_tokens=60, seed=seed, structured_output=WORDS),
        )
        for seed in range(number)
    ]


def limited(max_states: int) -> Callable[[GrammarLibrary, StructuredOutput], Compiled]:
    """Compiles grammars with a lower limit."""

    def compile_with_limit(library: GrammarLibrary, output: StructuredOutput) -> Compiled:
        grammar, limits = (
            LLMatcher.grammar_from_regex(output.source),
            LLParserLimits(max_lexer_states=max_states),
        )
        return Compiled(LLMatcher(library.load_tokenizer(), grammar, log_level=0, limits=limits), 0)

    return compile_with_limit


@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS.keys())
def test_answers_continue_with_a_new_grammar_when_the_compiled_one_is_at_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any]
) -> None:
    with EnginesOf(folder) as engines:
        plain = engines.start("plain", speculation=PLAIN, **ROOMY)
        expected = tokens_of(ask(engines, plain, make_requests()))
        monkeypatch.setattr(GrammarLibrary, "compile", limited(MAX_STATES))
        engine = engines.start("limited", speculation=speculation, **ROOMY)
        assert _asked_until_done(engines, engine, make_requests()) == expected


def test_answers_that_wait_for_a_slot_continue_with_a_new_grammar(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their grammar is compiled when the requests are added, and is at its limit when they begin."""
    requests, scheduler = make_requests(24), {**ROOMY, "max_num_seqs": 16}
    with EnginesOf(folder) as engines:
        plain = engines.start("plain", speculation=PLAIN, **scheduler)
        expected = tokens_of(ask(engines, plain, requests))
        monkeypatch.setattr(GrammarLibrary, "compile", limited(MAX_STATES))
        engine = engines.start("limited", speculation=PLAIN, **scheduler)
        assert _asked_until_done(engines, engine, requests) == expected


def _asked_until_done(
    engines: EnginesOf, engine: WholeEngine, requests: list[EngineRequest]
) -> dict[str, list[int]]:
    """Asks again for the rest of answers that are given back, as the gateway does. Checks that some are given back."""
    done: dict[str, list[int]] = {}
    num_given_back = 0
    while requests:
        answers, rest = ask(engines, engine, requests), []
        assert any(answer.token_ids for answer in answers.values()), "some answer grows with each grammar"
        for request in requests:
            answer = answers[request.request_id]
            token_ids = (*request.output_token_ids, *answer.token_ids)
            assert answer.end is not None
            if answer.end.error_kind is ErrorKind.GIVEN_BACK:
                assert "too many states" in str(answer.end.error)
                rest.append(replace(request, output_token_ids=token_ids))
                num_given_back += 1
            else:
                assert answer.end.error is None
                done[request.request_id] = list(token_ids)
        requests = rest
    assert num_given_back
    return done
