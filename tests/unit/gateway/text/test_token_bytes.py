"""Token bytes: put together, they are the text, however a tokenizer writes its vocabulary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders

from gateway.text.token_bytes import BYTE_OF_CHARACTER, TokenBytes
from tests.factories.tokenizers import KINDS, with_byte_fallback, with_metaspace

TOKENIZERS = {kind: make() for kind, make in KINDS.items()}
TOKEN_BYTES = {kind: TokenBytes(tokenizer) for kind, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "added tokens"])
@given(text=st.text(max_size=30).filter(lambda text: "<" not in text))  # it may spell a special token
def test_the_bytes_of_a_texts_tokens_are_the_texts(kind: str, text: str) -> None:
    token_ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    spelt = b"".join(map(TOKEN_BYTES[kind].of, token_ids))
    # Sentencepiece's kind writes a space before the first word, which belongs to no text.
    space = b" " if kind == "byte-fallback" and text else b""
    assert spelt == space + text.replace("▁", " " if space else "▁").encode()


def test_every_token_of_metaspace_reads_as_in_the_middle_of_a_text() -> None:
    tokenizer = with_metaspace()
    spelt = [TokenBytes(tokenizer).of(token_id) for token_id in tokenizer.encode("the cache is").ids]
    assert b"".join(spelt) == b" the cache is"


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_token_has_the_bytes_that_the_library_decodes_it_to(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    anchor = tokenizer.encode("x", add_special_tokens=False).ids[-1]
    for token_id in range(tokenizer.get_vocab_size()):
        decoded = tokenizer.decode([anchor, token_id], skip_special_tokens=False)
        if "\ufffd" not in decoded:
            assert TOKEN_BYTES[kind].of(token_id) == decoded.removeprefix("x").encode()


def test_a_byte_of_the_fallback_is_that_byte() -> None:
    tokenizer = with_byte_fallback()
    assert TokenBytes(tokenizer).of(tokenizer.get_vocab()["<0xF0>"]) == b"\xf0"


def test_a_word_that_looks_like_a_byte_is_a_word_where_there_is_no_fallback() -> None:
    tokenizer = with_metaspace()
    tokenizer.add_tokens(["<0xF0>"])
    assert TokenBytes(tokenizer).of(tokenizer.get_vocab()["<0xF0>"]) == b"<0xF0>"


def test_ids_without_a_token_have_no_bytes() -> None:
    assert all(of.of(10**6) == b"" for of in TOKEN_BYTES.values())


def test_the_alphabet_is_the_librarys() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    for character, byte in BYTE_OF_CHARACTER.items():
        assert decoders.ByteLevel().decode([character]) == bytes([byte]).decode(errors="replace")


def test_without_a_decoder_tokens_are_written_as_they_are() -> None:
    tokenizer = with_metaspace()
    tokenizer.decoder = None
    token_id = tokenizer.encode("cache").ids[0]
    assert TokenBytes(RustTokenizer.from_str(tokenizer.to_str())).of(
        token_id
    ).decode() == tokenizer.id_to_token(token_id)
