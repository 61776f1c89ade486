"""EchoedPrompt: where the tokens of a prompt begin in the text that a completion repeats before its answer."""

from collections.abc import Sequence

from gateway.text import Detokenizer, Tokenizer, num_before


class EchoedPrompt:
    """Takes the tokens of one prompt, in order. Their offsets never decrease, and never exceed the text's length.

    Offsets are exact if the text is what decoding the tokens gives. A special token that is not in the text, such as
    one that the tokenizer put before the text, has the offset of the next token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        token_ids: Sequence[int],
        is_clients_text: bool,
        skip_special_tokens: bool,
    ) -> None:
        """`is_clients_text`: the client sent this text, not the token ids."""
        self.text = text
        self.num_remaining = len(token_ids)
        """How many tokens still follow."""
        self._first_id = token_ids[0]
        self._num_tokens = len(token_ids)
        self._tokenizer = tokenizer
        self._is_clients_text = is_clients_text
        self._detokenizer = Detokenizer(tokenizer.backend, skip_special_tokens or is_clients_text)
        self._offset = 0

    def take_first(self) -> int | None:
        """Takes the first token, which begins at 0, and returns it. None if it was taken already."""
        if self.num_remaining < self._num_tokens:
            return None
        self.next_offset(self._first_id)
        return self._first_id

    def next_offset(self, token_id: int) -> int:
        """Takes the next token, and returns where it begins."""
        offset = self._offset
        text = self._detokenizer.push(token_id)
        if not text and self._is_clients_text:
            text = self._typed_special(token_id)
        self._offset = min(offset + len(text), len(self.text))
        self.num_remaining -= 1
        return min(offset + num_before(text, self._tokenizer.token_bytes(token_id)), len(self.text))

    def _typed_special(self, token_id: int) -> str:
        """The text of a special token that the client wrote at this place; else empty."""
        if self._tokenizer.decode([token_id], skip_special_tokens=True):
            return ""
        typed = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return typed if self.text.startswith(typed, self._offset) else ""
