"""Compiled grammars whose automaton has grown to a limit, while answers were matched."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLParserLimits

from baton.clock import SystemClock
from baton.sampling import GrammarKind, StructuredOutput
from engine.grammars import library as module
from engine.grammars.compiler import GrammarCompiler, Matcher
from engine.grammars.library import Compiled, GrammarLibrary
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer

WORDS = StructuredOutput(GrammarKind.REGEX, "[a-z]*x.{30}")
"""Its automaton has more states than one answer visits."""


@pytest.fixture
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(
        folder, make_tokenizer().get_vocab_size(), (EOS_TOKEN_ID,), lambda: None, SystemClock()
    )
    yield compiler
    compiler.close()


def matcher_of(compiler: GrammarCompiler) -> Matcher:
    assert compiler._compile(WORDS) is None
    matcher = compiler.matcher(WORDS)
    assert matcher is not None
    return matcher


def error_of(matcher: Matcher, text: str) -> str | None:
    for token_id in make_tokenizer().encode(text).ids:
        assert matcher.allowed().any()
        if error := matcher.consume(token_id):
            return error
    return None


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_with_limit(library: GrammarLibrary, output: StructuredOutput) -> Compiled:
        grammar, limits = LLMatcher.grammar_from_regex(output.source), LLParserLimits(max_lexer_states=300)
        return Compiled(LLMatcher(library.load_tokenizer(), grammar, log_level=0, limits=limits), 0)

    monkeypatch.setattr(GrammarLibrary, "compile", compile_with_limit)


ANSWERS = ["xax" * 20, "xxa" * 20, "xaa" * 20, "axx" * 20]


@pytest.mark.usefixtures("few_states")
def test_a_grammar_at_a_limit_of_the_library_is_compiled_again_for_the_next_request(
    compiler: GrammarCompiler,
) -> None:
    errors = [error_of(matcher_of(compiler), answer) for answer in ANSWERS]
    assert any("too many states" in error for error in errors if error), "the limit is reached"
    assert error_of(matcher_of(compiler), "abcx") is None


@pytest.mark.usefixtures("few_states")
def test_an_answer_begins_anew_if_it_has_grown_or_another_one_found_the_limit(
    compiler: GrammarCompiler,
) -> None:
    """Otherwise, an answer might begin anew for ever. Requests that wait for a slot begin when the limit is
    known already."""
    matchers = [matcher_of(compiler) for _ in ANSWERS]
    late, running = matcher_of(compiler), matchers[-1]
    assert error_of(running, "a") is None
    may_begin = [running.may_begin_anew]
    for matcher, answer in zip(matchers, ANSWERS, strict=True):
        error_of(matcher, answer)
    may_begin.append(running.may_begin_anew)
    assert may_begin == [False, True]
    assert "too many states" in (error_of(late, ANSWERS[-1]) or "")
    assert late.may_begin_anew


@pytest.mark.usefixtures("few_states")
def test_an_answer_whose_earlier_tokens_alone_lead_to_the_limit_does_not_begin_anew(
    compiler: GrammarCompiler,
) -> None:
    finder = matcher_of(compiler)
    token_ids = make_tokenizer().encode("".join(random.Random(0).choices("ax", k=1000))).ids
    assert not any(map(finder.consume, token_ids)), "the library looks at the limit when it computes a mask"
    assert "too many states" in (error_of(finder, "a") or "")
    assert not finder.may_begin_anew


def test_a_grammar_that_grows_counts_with_its_growth_and_is_then_compiled_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StructuredOutput(GrammarKind.REGEX, "yes|no")
    assert error_of(matcher_of(compiler), "ab") is None
    before = compiler._find(WORDS)
    matcher_of(compiler)
    assert compiler._find(WORDS) is before, "it has hardly grown"
    monkeypatch.setattr(module, "COLD_MASK_S", -3.0)  # as if each mask took three seconds
    assert error_of(matcher_of(compiler), "ab") is None
    assert compiler._compile(other) is None
    assert compiler.is_full
    compiler.evict(in_use={other})
    assert compiler.matcher(WORDS) is None
    assert compiler.matcher(other) is not None
    assert error_of(matcher_of(compiler), "ab") is None
    before = compiler._find(WORDS)
    matcher_of(compiler)
    assert compiler._find(WORDS) is not before


def test_quick_masks_count_as_growth_too(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of a long string take little time, but each adds states."""
    monkeypatch.setattr(module, "COLD_MASK_S", 1000.0)
    monkeypatch.setattr(module, "MAX_GROWTH_BYTES", 3 * module.LEAST_GROWTH_BYTES)
    assert error_of(matcher_of(compiler), "abc") is None
    before = compiler._find(WORDS)
    assert error_of(matcher_of(compiler), "a") is None
    assert compiler._find(WORDS) is before
    matcher_of(compiler)
    assert compiler._find(WORDS) is not before
