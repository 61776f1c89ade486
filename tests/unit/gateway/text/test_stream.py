"""Text: characters come out whole, stop strings never come out, and nothing is lost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from gateway.text import Detokenizer, StopStrings, TextStream
from gateway.text.stream import MAX_PENDING_TOKENS
from tests.factories.models import make_tokenizer
from tests.factories.tokenizers import KINDS

TOKENIZER: RustTokenizer = make_tokenizer()
TOKENIZERS = {kind: make() for kind, make in KINDS.items()}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_are_never_broken(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False)  # a text may spell one
    pieces = [detokenizer.push(token_id) for token_id in ids(text)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("�" in piece for piece in pieces) or "�" in text


def test_a_character_of_many_bytes_waits_until_it_is_complete() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    tokens = ids("é👍")
    assert len(tokens) == 6
    assert [detokenizer.push(token_id) for token_id in tokens] == ["", "é", "", "", "", "👍"]


def test_bytes_that_are_no_character_are_shown_as_such_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    assert detokenizer.push(ids("👍")[0]) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    for skip, expected in ((True, ""), (False, "<|im_end|>")):
        detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
        assert detokenizer.push(2) + detokenizer.flush() == expected


def split(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_strings_are_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(piece) for piece in split(text, cuts))
    ends = {text.find(stop) + len(stop): stop for stop in stops if stop in text}
    if not ends:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        # One match may hide another that begins earlier and ends later: whichever is complete first ends the text.
        assert matcher.matched in stops
        assert text.startswith(shown + matcher.matched)
        assert not any(stop in shown for stop in stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=12), max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for end, character in enumerate(text, 1):
        shown += matcher.push(character)
        if matcher.matched is not None:
            return
        held = max(
            (n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0
        )
        assert shown == text[: end - held]


SIXTY_FOUR_LONG_STOPS = [("ab" * 499 + str(number))[:1000] for number in range(64)]


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (SIXTY_FOUR_LONG_STOPS, "ab" * 5_000),
        (["a" * 999 + "b"], "a" * 5_000),
        ([*SIXTY_FOUR_LONG_STOPS, "b" * 999 + "a"], ("ab" * 498 + "b") * 10),
        ([f"\u0400{number}" for number in range(64)], "ab" * 5_000),
    ],
)
def test_c58_looking_for_stop_strings_costs_a_few_steps_a_character_however_many_and_long(
    stops: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher, num_steps, step = StopStrings(stops), 0, StopStrings._longer

    def counted(self: StopStrings, state: int, character: str) -> int:
        nonlocal num_steps
        num_steps += 1
        return step(self, state, character)

    monkeypatch.setattr(StopStrings, "_longer", counted)
    assert "".join(map(matcher.push, text)) + matcher.flush() == text
    assert num_steps <= 4 * len(text)  # two for the text, two for the automaton


@given(
    st.lists(st.tuples(st.text("aé👍 ", max_size=6), st.integers(0, 150)), max_size=6),
    st.sampled_from(["byte-level", "metaspace", "added tokens"]),
)
def test_c58_tokens_without_text_do_not_pile_up_and_change_nothing(
    parts: list[tuple[str, int]], kind: str
) -> None:
    """For example, a client may have forbidden that an end-of-sequence token ends the answer."""
    tokenizer = TOKENIZERS[kind]
    special = next(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    token_ids = [
        token_id
        for text, number in [("a", 0), *parts]
        for token_id in [*tokenizer.encode(text, add_special_tokens=False).ids, *[special] * number]
    ]
    detokenizer, pieces = Detokenizer(tokenizer, skip_special_tokens=True), []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        assert len(detokenizer._pending) < MAX_PENDING_TOKENS
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_c58_bytes_that_never_form_a_character_do_not_pile_up() -> None:
    detokenizer, middle = Detokenizer(TOKENIZER, skip_special_tokens=True), ids("👍")[1]
    first = "".join(detokenizer.push(middle) for _ in range(3 * MAX_PENDING_TOKENS))
    assert len(detokenizer._pending) < MAX_PENDING_TOKENS
    rest = "".join(map(detokenizer.push, ids(" and 👍"))) + detokenizer.flush()
    assert first + rest == "\ufffd" * 3 * MAX_PENDING_TOKENS + " and 👍"


def test_a_possible_beginning_of_a_stop_string_is_held_back_until_it_is_ruled_out() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("fine\n") == "fine"
    assert matcher.push("\nUs") == ""
    assert matcher.push("ual") == "\n\nUsual"
    assert matcher.matched is None


def test_tokens_past_a_stop_string_do_not_count() -> None:
    stream = TextStream(TOKENIZER, ["lazy"], 0, True)
    tokens = ids("The lazy dog")
    num_counted, text = stream.push(tokens)
    assert text == "The "
    assert stream.matched_stop == "lazy"
    assert TOKENIZER.decode(tokens[:num_counted]).endswith("lazy")
    assert num_counted < len(tokens)


@pytest.mark.parametrize(
    ("stop", "min_tokens", "shown", "num_counted"),
    [
        ("a", 0, "", 1),
        ("a", 1, "ab", 3),  # as EOS, which the first token cannot be
        ("ba", 2, "a", 3),  # begins within the first tokens, but ends after them
        ("bab", 3, "a", 4),
        ("ab", 3, "ab", 4),  # once within the first tokens, once after them
        ("bab", 4, "abab", 4),
        ("aba", 3, "abab", 4),
        ("abax", 2, "abab", 4),
    ],
)
@pytest.mark.parametrize("at_once", [1, 100])
def test_c10_a_stop_string_that_ends_within_min_tokens_has_no_effect(
    stop: str, min_tokens: int, shown: str, num_counted: int, at_once: int
) -> None:
    """vLLM does the same."""
    tokens, text, counted = ids("abab"), "", 0
    stream = TextStream(TOKENIZER, [stop], min_tokens, True)
    for at in range(0, len(tokens), at_once):
        if stream.matched_stop is None:
            num, more = stream.push(tokens[at : at + at_once])
            counted, text = counted + num, text + more
    assert (text + stream.flush(), counted) == (shown, num_counted)


def test_c10_a_stop_string_may_overlap_one_without_effect() -> None:
    matcher = StopStrings(["one!?", "!?two"])
    assert matcher.push("so one!?", may_end=False) == "so one"
    assert matcher.push("two") == ""
    assert matcher.matched == "!?two"
    matcher = StopStrings(["abab"])
    assert [matcher.push("abab", may_end=False), matcher.push("ab"), matcher.matched] == ["ab", "", "abab"]


def test_c10_a_longer_stop_string_ends_the_answer_after_a_shorter_one_without_effect() -> None:
    matcher = StopStrings(["Human", "Human:"])
    assert matcher.push("A Human", may_end=False) == "A "
    assert (matcher.push(":"), matcher.matched) == ("", "Human:")
    matcher = StopStrings(["Human", "Human:"])
    assert matcher.push("A Human", may_end=False) + matcher.push(" is") == "A Human is"
    assert (matcher.push(" a Human"), matcher.matched) == (" a ", "Human")


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_without_a_match_flush_gives_the_rest(stops: list[str]) -> None:
    stream = TextStream(TOKENIZER, stops, 0, True)
    _, text = stream.push(ids("fuzz"))
    assert text + stream.flush() == "fuzz"


def test_bytes_that_are_no_character_never_end_a_byte_fallback_stream() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257, "<unk>": 258}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    token_ids = [
        vocab["a"],
        0x0A,
        0xE3,
        vocab["b"],
        vocab["a"],
    ]  # a newline is shown, then a lead byte comes alone
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == "a\n\ufffdba"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "added tokens"])
@given(text=st.text(max_size=30), others=st.lists(st.integers(0, 299), max_size=8), keep=st.booleans())
def test_no_tokens_break_a_character_whatever_kind_of_tokenizer(
    kind: str, text: str, others: list[int], keep: bool
) -> None:
    """Text as a model would write it, and after it arbitrary tokens."""
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=not keep)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    shown = "".join(pieces)
    assert shown + detokenizer.flush() == tokenizer.decode(token_ids, skip_special_tokens=not keep)
    assert "\ufffd" not in shown or "\ufffd" in text
    for token_id in others:
        assert isinstance(detokenizer.push(token_id), str)
    detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
def test_the_first_word_of_an_answer_keeps_the_space_before_it(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("the cache is the baton", add_special_tokens=False).ids
    for cut in range(1, len(token_ids)):
        prompt, answer = token_ids[:cut], token_ids[cut:]
        detokenizer = Detokenizer(tokenizer, True, prompt)
        text = "".join(map(detokenizer.push, answer)) + detokenizer.flush()
        assert tokenizer.decode(prompt) + text == "the cache is the baton"


@pytest.mark.parametrize("character", ["é", "日", "👍"])
@pytest.mark.parametrize("kind", ["byte-fallback", "byte-level"])
def test_the_first_word_keeps_its_space_after_characters_of_several_tokens(kind: str, character: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = tokenizer.encode(f"the {character * 3}", add_special_tokens=False).ids
    answer = tokenizer.encode(f"the {character * 3} cache", add_special_tokens=False).ids[len(prompt) :]
    detokenizer = Detokenizer(tokenizer, True, prompt)
    assert "".join(map(detokenizer.push, answer)) + detokenizer.flush() == " cache"


def test_a_prompt_that_ends_within_a_character_is_not_said_again() -> None:
    tokens = ids("xé!")
    detokenizer = Detokenizer(TOKENIZER, True, tokens[:2])
    assert "x" not in "".join(map(detokenizer.push, tokens[2:])) + detokenizer.flush()


def test_a_token_that_ends_the_answer_adds_text_only_if_a_parser_needs_it() -> None:
    first, end = ids("a")[0], ids("!")[0]
    for kept, text in (({}, "a"), ({end: "<end>"}, "a<end>")):
        stream = TextStream(TOKENIZER, ("a!",), 0, True, kept_tokens=kept)
        number, shown = stream.push([first, end], end)
        assert (number, shown + stream.flush()) == (2, text)
