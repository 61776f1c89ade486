"""Text to tokens and back, with the model's own tokenizer; knows no request and no worker."""

from gateway.text.pool import TokenizerPool
from gateway.text.stream import NO_TOKENS, Detokenizer, StopStrings, TextStream
from gateway.text.token_bytes import num_before
from gateway.text.tokenizer import Tokenizer

__all__ = [
    "NO_TOKENS",
    "Detokenizer",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "TokenizerPool",
    "num_before",
]
