"""Small tokenizers of all kinds that models use, trained in the test."""

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.factories.models import CORPUS, make_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""The names of bytes in a vocabulary with byte fallback."""


def with_byte_fallback() -> Tokenizer:
    """Like those of Llama 2, Mistral and Gemma: spaces become a mark, unknown text becomes bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    trained.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    learnt = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in learnt["merges"]]
    # Made a second time, since the trainer would recognize bytes in the middle of texts, like special tokens.
    tokenizer = Tokenizer(
        models.BPE(vocab=learnt["vocab"], merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def with_metaspace() -> Tokenizer:
    """Like sentencepiece's unigram models (T5, XLM-R): there are no bytes, and unknown text is lost."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_added_tokens() -> Tokenizer:
    """Byte-level, with added tokens outside of its alphabet: spaces, and a word of two characters."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("    ", normalized=False), AddedToken("日本", normalized=False)])
    tokenizer.add_special_tokens(["<|tool|>"])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": make_tokenizer,
    "byte-fallback": with_byte_fallback,
    "metaspace": with_metaspace,
    "added tokens": with_added_tokens,
}
