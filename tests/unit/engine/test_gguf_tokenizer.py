"""Tokenizers from GGUF files give the tokens of transformers' own conversion."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from baton.errors import ModelError
from engine.loading.gguf import GgufFile, Value
from engine.loading.gguf_tokenizer import special_tokens, tokenizer_json
from tests.factories.models import CORPUS

ROOT = Path(__file__).parents[3]
SPECIAL = ["<unk>", "<s>", "</s>"]
PRE_TOKENIZERS = ["llama-bpe", "qwen2", "tekken", "gpt-2", "smollm", "gpt-4o"]
SAME = {
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
    "glm4": "llama-bpe",
    "chatglm-bpe": "llama-bpe",
    "olmo": "gpt-2",
}
"""Other names of rules."""


def texts() -> list[str]:
    """Documents, code, and random characters: letters of many scripts, marks, digits, spaces, emoji."""
    files = [ROOT / "README.md", ROOT / "docs/architecture.md", Path(__file__)]
    rng = random.Random(2)
    ranges = [
        (0x20, 0x7F),
        (0x20, 0x41),
        (0xA0, 0x250),
        (0x300, 0x700),
        (0x900, 0xE00),
        (0x3040, 0x30FF),
        (0x1F300, 0x1F600),
    ]
    spaces = " \t\n\r\u00a0\u2003"
    drawn = [
        "".join(
            rng.choice(spaces) if rng.random() < 0.25 else chr(rng.randrange(*rng.choice(ranges)))
            for _ in range(rng.randrange(1, 40))
        )
        for _ in range(600)
    ]
    tricky = [
        "",
        "I'll, WE'LL; don't",
        "a1b22c333 4444",
        "x  5\n\n  y",
        "²½٣Ⅷ",
        "e\u0301 é",
        "<s> </s><unk>",
        "\x00\x7f",
    ]
    return [*(file.read_text() for file in files), *drawn, *tricky]


def make_file(values: dict[str, Any]) -> GgufFile:
    metadata: dict[str, Value] = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return GgufFile(Path("some.gguf"), metadata, {}, 0)


def byte_level(pre: str, **values: Any) -> GgufFile:
    """A vocabulary of 700 tokens, with merges over spaces and digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [*CORPUS, (ROOT / "README.md").read_text(), "1 22 333   4444\n\n  55"], trainer
    )
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    words = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in state["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return make_file(words | values)


def ours(file: GgufFile) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(file)))


def theirs(file: GgufFile) -> Tokenizer:
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    backend, _ = convert_gguf_tokenizer("llama", {names.get(key, key): value for key, value in keys.items()})
    assert isinstance(backend, Tokenizer)
    return backend


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokens_are_those_of_transformers(pre: str) -> None:
    file = byte_level(pre)
    found, expected = ours(file), theirs(file)
    if pre == "smollm":
        # transformers' conversion knows no `smollm`; the model's own tokenizer.json has these two.
        cut = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        expected.pre_tokenizer = pre_tokenizers.Sequence(cut)
    if pre == "qwen2":
        expected.normalizer = (
            found.normalizer
        )  # the model's own tokenizer.json has NFC, which transformers leaves out
    for text in texts():
        tokens = found.encode(text, add_special_tokens=False).ids
        if pre in ("llama-bpe", "tekken", "gpt-4o"):
            # transformers does not prefer whole words, as the models' own files do
            cuts = [each.pre_tokenizer.pre_tokenize_str(text) for each in (found, expected)]
            assert cuts[0] == cuts[1], repr(text)
        else:
            assert tokens == expected.encode(text, add_special_tokens=False).ids, repr(text)
        if pre != "qwen2":
            assert found.decode(tokens, skip_special_tokens=False) == text


def test_pre_tokenizers_differ() -> None:
    """Otherwise the test above would hold for any pre-tokenizer."""
    text = "I'LL  see McX 12345\n\n x"
    cuts = [ours(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text) for pre in PRE_TOKENIZERS]
    assert len({str(cut) for cut in cuts}) == len(PRE_TOKENIZERS)


def test_other_names_of_the_same_cut() -> None:
    """llama.cpp looks words up before it merges with `llama-bpe`, but not with these.

    SmolLM3 (`smaug-bpe`) has Llama 3's vocabulary, in which some words have no merges, so its rule looks words up.
    """
    file = byte_level("")
    for pre, same in SAME.items():
        files = [make_file({"pre": name}).metadata for name in (pre, same)]
        found, known = (tokenizer_json(replace(file, metadata=file.metadata | keys)) for keys in files)
        assert found["pre_tokenizer"] == known["pre_tokenizer"]
        assert found["normalizer"] is None
        assert found["model"]["ignore_merges"] == (pre == "smaug-bpe")
        assert Tokenizer.from_str(json.dumps(found)).encode("x").tokens == ["x"], "without a beginning"


def test_a_whole_word_of_the_vocabulary_needs_no_merges() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"tokens": [*SPECIAL, *alphabet, "ab", "hello"], "token_type": [], "merges": ["a b"]}
    assert ours(byte_level("llama-bpe", **words)).encode("hello").tokens == ["<s>", "hello"]
    assert ours(byte_level("gpt-2", **words)).encode("hello").tokens == list("hello")


@pytest.mark.parametrize(
    ("pre", "values", "expected"),
    [
        ("gpt-2", {}, []),
        ("gpt-2", {"add_bos_token": True}, ["<s>"]),
        ("llama-bpe", {}, ["<s>"]),
        ("falcon3", {}, ["<s>"]),
        ("pixtral", {}, ["<s>"]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("qwen2", {"add_eos_token": True}, ["</s>"]),
    ],
)
def test_tokens_around_a_text(pre: str, values: dict[str, Any], expected: list[str]) -> None:
    encoding = ours(byte_level(pre, **values)).encode("a")
    assert [token for token in encoding.tokens if token in SPECIAL] == expected


def test_special_tokens_are_named() -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    assert special_tokens(byte_level("gpt-2", unknown_token_id=0, padding_token_id=2)) == names
    older_converter = byte_level("gpt-2", unknown_token_id=0, padding_token_id=2, token_type=[1] * 700)
    assert special_tokens(older_converter) == names


def sentence_piece(**values: Any) -> GgufFile:
    """Pieces with scores as SentencePiece numbers them: the earlier, the better."""
    pieces = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "ou",
        "an",
        "▁an",
        "ca",
        "▁ca",
        "ch",
        "che",
        "▁cache",
        "▁▁",
        "▁▁▁▁",
    ]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzTWO▁.,é"))
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    num_others = len(tokens) - len(pieces) - len(letters)
    scores = [0.0] * num_others + [-float(i) for i in range(len(pieces) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    words = {"tokens": tokens, "scores": scores, "token_type": types, "model": "llama"}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return make_file(words | ids | values)


def test_sentence_piece_tokens_are_those_of_transformers() -> None:
    file = sentence_piece()
    found, expected = ours(file), theirs(file)
    num_compared = 0
    for text in texts():
        tokens = found.encode(text, add_special_tokens=False).ids
        if not text.startswith((" ", "<")) and "▁" not in text and text:
            # transformers' prefix differs where a text begins with a space; SentencePiece always adds one
            num_compared += 1
            assert tokens == expected.encode(text, add_special_tokens=False).ids, repr(text)
        if not any(token in text for token in SPECIAL):
            assert found.decode(tokens, skip_special_tokens=False) == text
    assert num_compared > 400


def test_sentence_piece_begins_with_bos_and_a_space() -> None:
    assert ours(sentence_piece()).encode("the cache").tokens == ["<s>", "▁the", "▁cache"]
    assert ours(sentence_piece()).encode("  the").tokens == ["<s>", "▁▁", "▁the"]
    plain = ours(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert plain.encode("the cache").tokens == ["t", "he", "▁cache"]
    assert plain.decode(plain.encode(" the").ids) == " the"


def test_marks_of_phi_3_swallow_the_spaces_behind_them() -> None:
    tokens = sentence_piece().strings("tokenizer.ggml.tokens")
    file = sentence_piece(tokens=["<unk>", "<s>", "<|user|>", *tokens[3:]])
    text = "<|user|>\n the<s> the"

    def encoded() -> list[str | None]:
        tokenizer = ours(file)
        return [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode(text).ids]

    assert encoded() == ["<s>", "<|user|>", "▁", "<0x0A>", "▁the", "<s>", "▁", "▁the"]
    file.metadata["general.architecture"] = "phi3"
    assert encoded() == ["<s>", "<|user|>", "▁the", "<s>", "▁", "▁the"]


def test_a_token_that_is_too_long_to_cut_everywhere_is_refused() -> None:
    file = sentence_piece()
    tokens = file.strings("tokenizer.ggml.tokens")
    with pytest.raises(
        ModelError, match=r"some\.gguf: a token has 5,000 characters; at most 4,096 are supported"
    ):
        tokenizer_json(sentence_piece(tokens=[*tokens[:-1], "e" * 5000]))
    with pytest.raises(ModelError, match=r"some\.gguf: the tokens of tokenizer\.ggml\.tokens are too long"):
        tokenizer_json(sentence_piece(tokens=[*tokens[:-20], *("e" * (4096 - i) for i in range(20))]))
