"""One request's output as text: converts tokens as they arrive, and ends at a stop string."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


NUM_CONTEXT_TOKENS = 4
"""Tokens from the end of a prompt that serve as context for decoding the answer."""


class Detokenizer:
    """Turns one request's tokens into text as they arrive, never splitting a character."""

    def __init__(
        self, backend: "RustTokenizer", skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """After a prompt, a first word keeps the space before it, which decoders drop at the beginning of a text."""
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = self._stream_behind(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:
            # DecodeStream raises a bare Exception when bytes that form no character change text it has already
            # returned, as byte-fallback tokenizers can. Returned text stays; decoding restarts after it.
            self._stream = self._stream_behind([token_id])
            return self.flush()
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """The rest when no more tokens come; bytes that form no character become U+FFFD."""
        text = self._backend.decode(self._pending, skip_special_tokens=self._skip_special_tokens)
        self._pending.clear()
        return str(text)

    def _stream_behind(self, token_ids: Sequence[int]) -> DecodeStream:
        """A context that ends within a character would be output again with the rest of it, so it is dropped."""
        context = list(token_ids)
        text = self._backend.decode(context, skip_special_tokens=self._skip_special_tokens)
        if text.endswith("\ufffd"):
            context = []
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Looks for stop strings in a stream of text, holding back whatever could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._beginnings = [_Beginning(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show; nothing more once `matched` is set."""
        if not self._beginnings:
            return text
        if self.matched is not None:
            return ""
        keep = max(each.push(text) for each in self._beginnings)
        text = self._held + text
        hits = [(at, each.stop) for each in self._beginnings if (at := text.find(each.stop)) >= 0]
        if hits:
            at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Text that was held back in vain."""
        for each in self._beginnings:
            each.num_seen = 0
        held, self._held = self._held, ""
        return held


class _Beginning:
    """How much of one stop string the text ends with: a few steps per character, for any lengths (Knuth, Morris and
    Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_seen = 0
        self._shorter: list[int] = []
        """By the number of matched characters, less one: the length of the longest prefix that they end with.
        Computed as needed."""

    def push(self, text: str) -> int:
        """How many of the stop string's characters all text so far ends with; all of them if it has matched."""
        for character in text:
            self.num_seen = self._behind(self.num_seen, character)
            if self.num_seen == len(self.stop):
                break
            if self.num_seen > len(self._shorter):
                self._shorter.append(self._behind(self._shorter[-1], character) if self._shorter else 0)
        return self.num_seen

    def _behind(self, num_seen: int, character: str) -> int:
        while num_seen and self.stop[num_seen] != character:
            num_seen = self._shorter[num_seen - 1]
        return num_seen + (self.stop[num_seen] == character)


class TextStream:
    """Tokens in, text out, ended by a stop string: one request's view of its own output."""

    def __init__(
        self,
        backend: "RustTokenizer",
        stops: Sequence[str],
        min_tokens: int,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(backend, skip_special_tokens, prompt_token_ids)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """How many of the tokens count, and the text they add. Tokens after a stop string do not count."""
        pieces = []
        for index, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text = self._detokenizer.push(token_id)
            if self._num_tokens < self._min_tokens:
                pieces.append(self._stops.flush() + text)  # too early to look for stop strings
                continue
            pieces.append(self._stops.push(text))
            if self._stops.matched is not None:
                return index, "".join(pieces)
        return len(token_ids), "".join(pieces)

    def flush(self) -> str:
        """The rest of the text, when no more tokens come."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
