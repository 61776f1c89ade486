"""Tokens that a grammar forces, as its matcher takes them."""

from pathlib import Path

import pytest

from baton.sampling import GrammarKind, StructuredOutput
from engine.grammars import compiler as module
from engine.grammars.compiler import Matcher
from engine.grammars.library import GrammarLibrary
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer


def make_matcher(folder: Path, output: StructuredOutput) -> Matcher:
    vocab_size = make_tokenizer().get_vocab_size()
    library = GrammarLibrary(folder / "tokenizer.json", vocab_size, (EOS_TOKEN_ID,))
    return Matcher(library.compile(output), library.load_tokenizer(), vocab_size)


def test_c64_forced_tokens_are_the_only_ones_allowed_in_their_places(folder: Path) -> None:
    text = "a block is one span. Its end: "
    output = StructuredOutput(GrammarKind.REGEX, f"{text}(left|right) one")
    ahead, matcher = make_matcher(folder, output), make_matcher(folder, output)
    tokenizer, stop = make_tokenizer(), frozenset({EOS_TOKEN_ID})
    forced = ahead.take_forced(100, stop)
    assert len(forced) > 5
    assert text.startswith(tokenizer.decode(list(forced)))
    assert list(forced) == tokenizer.encode(text).ids[: len(forced)]
    for token_id in forced:
        assert matcher.allowed().nonzero()[0].tolist() == [token_id]
        assert matcher.consume(token_id) is None
    assert len(matcher.allowed().nonzero()[0]) > 1
    assert ahead.take_forced(100, stop) == (), "now there is a choice"
    ahead.rewind(0)
    assert ahead.take_forced(100, stop) == forced
    rest = tokenizer.encode((text + "left")[len(tokenizer.decode(list(forced))) :]).ids
    assert [ahead.consume(token_id) for token_id in rest] == [None] * len(rest)
    end = (*tokenizer.encode(" one").ids, EOS_TOKEN_ID)
    assert ahead.take_forced(len(end) - 1, stop) == end[:-1], "a limit"
    assert ahead.take_forced(100, stop) == end[-1:]


def test_c64_a_long_forced_text_is_taken_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = StructuredOutput(GrammarKind.REGEX, "one worker computes the prompt")
    monkeypatch.setattr(module, "MAX_TOKENS_LOOKED_AT", 20)
    matcher = make_matcher(folder, output)
    parts = [matcher.take_forced(100, frozenset({EOS_TOKEN_ID}))]
    while parts[-1] and parts[-1][-1] != EOS_TOKEN_ID:
        parts.append(matcher.take_forced(100, frozenset({EOS_TOKEN_ID})))
    assert len(parts) > 2
    assert sum(parts, ()) == (*make_tokenizer().encode(output.source).ids, EOS_TOKEN_ID)


def test_after_a_draft_that_leads_to_a_dead_end_no_other_draft_is_tried(folder: Path) -> None:
    """The way back from there costs as much as all tokens so far."""
    grammar = StructuredOutput(GrammarKind.LARK, 'start: "a" (" no" end | " yes")\nend: end "x"')
    matcher, tokenizer = make_matcher(folder, grammar), make_tokenizer()
    a, yes, no = (tokenizer.encode(text).ids for text in ("a", " yes", " no"))
    assert [matcher.consume(each) for each in a] == [None]
    assert matcher.num_valid(no) == len(no)
    assert matcher.allowed(no).all(), "no answer gets there, unless the draft is right"
    assert matcher.allowed(yes[:1]).all()
    assert matcher.num_valid(yes) == 0
    for token_id in (*yes, EOS_TOKEN_ID):
        assert matcher.allowed().sum() < len(matcher.allowed())
        assert matcher.consume(token_id) is None


@pytest.mark.parametrize("source", ["<\\|im_start\\|>", "one <\\|im_start\\|>two( three)?"])
def test_c64_a_forced_text_that_spells_a_special_token_has_ordinary_tokens(folder: Path, source: str) -> None:
    output = StructuredOutput(GrammarKind.REGEX, source)
    ahead, matcher = make_matcher(folder, output), make_matcher(folder, output)
    forced = ahead.take_forced(100, frozenset({EOS_TOKEN_ID}))
    for token_id in forced:
        assert matcher.allowed().nonzero()[0].tolist() == [token_id]
        assert matcher.consume(token_id) is None
    text = make_tokenizer().decode(list(forced), skip_special_tokens=True)
    assert text == source.replace("\\", "").removesuffix("( three)?")


def test_a_forced_integer_of_more_than_64_bits_stays_as_it_is(folder: Path) -> None:
    output = StructuredOutput(GrammarKind.JSON_SCHEMA, '{"const": 100000000000000000000}')
    matcher = make_matcher(folder, output)
    for token_id in make_tokenizer().encode("100000000000000000000").ids:
        assert matcher.consume(token_id) is None
    assert matcher.allowed().nonzero()[0].tolist() == [EOS_TOKEN_ID]
