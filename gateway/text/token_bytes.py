"""TokenBytes: the bytes of one token, even if they are only part of a character."""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback write a token that is one byte."""


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet of byte-level vocabularies, from characters to bytes. Printable bytes are written as themselves,
    all other bytes as the characters from 256 on (`bytes_to_unicode` of openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class TokenBytes:
    """Finds the bytes of tokens. Caches its results: at most one entry per token of the vocabulary."""

    def __init__(self, backend: "RustTokenizer") -> None:
        self._backend = backend
        steps = _steps(backend.decoder)
        self._is_byte_level = "ByteLevel" in steps
        self._has_byte_fallback = "ByteFallback" in steps
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; empty for an unknown id."""
        known = self._known.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id)
            if piece is None:
                return b""
            known = self._known[token_id] = self._bytes_of(piece)
        return known

    def _bytes_of(self, piece: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in piece)
            except KeyError:
                return piece.encode()  # an added token is literal text, also for the library
        if self._has_byte_fallback and (match := FALLBACK.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if self._backend.decoder is None:
            return piece.encode()
        # Decode it after another token: at the beginning of a text, decoders drop the space before a word.
        return str(self._backend.decoder.decode(["a", piece])).removeprefix("a").encode()


def num_before(text: str, raw: bytes) -> int:
    """How many characters of `text` come from earlier tokens. `raw`: the bytes of the token that completed `text`.

    The number is above 0 if the earlier tokens were parts of a character that the last token does not continue.
    """
    own = raw.decode(errors="replace")
    return len(text) - len(own) if own and text.endswith(own) else 0


def _steps(decoder: Any) -> set[str]:
    """The kinds of steps of a decoder; its state is its JSON from tokenizer.json."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}
