"""TextStream: one request's output as text. It converts tokens as they arrive, and ends at a stop string."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


NUM_CONTEXT_TOKENS = 4
"""How many tokens serve as context for decoding the tokens after them."""
MAX_PENDING_TOKENS = 64
"""This many tokens without text cannot belong to one incomplete character. DecodeStream decodes all pending tokens
again at every further token, so more of them would cost time."""
MAX_CHARACTER_TOKENS = 4
"""A character has at most this many tokens: it has at most four bytes, and a token has at least one."""

NO_TOKENS: Mapping[int, str] = MappingProxyType({})

_NOTHING = 0
"""The state of StopStrings after a text whose end is not the beginning of any stop string."""
_UNKNOWN = 2**32 - 1


class Detokenizer:
    """Turns one request's tokens into text as they arrive, never splitting a character."""

    def __init__(
        self,
        backend: "RustTokenizer",
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
        kept_tokens: Mapping[int, str] = NO_TOKENS,
    ) -> None:
        """The prompt's tokens are the context of the first word. Without a context, decoders drop the space
        before it. `kept_tokens`: special tokens that are never skipped, and their texts."""
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._kept_tokens = kept_tokens
        self._context = self._last_of(prompt_token_ids)
        """The last tokens that became text."""
        self._stream = self._stream_after(self._context)
        self._pending: list[int] = []

    def keeps(self, token_id: int) -> bool:
        """Whether this is one of the tokens that are never skipped."""
        return token_id in self._kept_tokens

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if (kept := self._kept_tokens.get(token_id)) is not None:
            before = self.flush()
            self._stream = self._stream_after([token_id])
            return before + kept
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:
            # DecodeStream raises a bare Exception when bytes that form no character change text it has already
            # returned, as byte-fallback tokenizers can. Returned text stays; decoding restarts after it.
            self._context = [token_id]
            self._stream = self._stream_after(self._context)
            return self.flush()
        if text is not None:
            self._context = self._pending[-NUM_CONTEXT_TOKENS:]
            self._pending.clear()
            return str(text)
        return self._restart() if len(self._pending) >= MAX_PENDING_TOKENS else ""

    def flush(self) -> str:
        """The rest of the text. Call this when no more tokens follow. Bytes that form no character become U+FFFD."""
        text = self._decode(self._pending)
        self._pending.clear()
        return text

    def _restart(self) -> str:
        """The text of the pending tokens, without the tokens at the end that may begin a character. Decoding restarts
        with those tokens.
        """
        pending, self._pending = self._pending, []
        ends = range(len(pending), len(pending) - MAX_CHARACTER_TOKENS, -1)
        texts = {end: self._decode(pending[:end]) for end in ends}
        end = next((end for end in ends if not texts[end].endswith("\ufffd")), len(pending))
        if texts[end]:
            self._context = pending[:end][-NUM_CONTEXT_TOKENS:]
        self._stream = self._stream_after(self._context)
        return texts[end] + "".join(map(self.push, pending[end:]))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def _last_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """A prompt's last tokens, which begin with a whole character: decoders may show a character that follows a part
        of another one as U+FFFD, too."""
        counts = range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_CHARACTER_TOKENS)
        contexts = [list(prompt_token_ids[-count:]) for count in counts]
        whole = (context for context in contexts if not self._decode(context).endswith("\ufffd"))
        return next(whole, contexts[0])

    def _stream_after(self, token_ids: Sequence[int]) -> DecodeStream:
        """A stream that decodes the tokens after `token_ids`. If `token_ids` end within a character, the stream has no
        context, since the context's text would be output again with the rest of the character.
        """
        context = list(token_ids)
        if self._decode(context).endswith("\ufffd"):
            context = []
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Looks for stop strings in a stream of text, and holds back text that may be the beginning of one.

    This is an automaton over all stop strings (Aho and Corasick, 1975). It adds states only when the text
    needs them. Each character takes a few steps, even if there are many or long stop strings. A state stands for the
    longest suffix of the text that is the beginning of a stop string. The state's number is `first * stride + length`,
    where `first` is the first of the sorted stop strings with this beginning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self._initials = frozenset(stop[0] for stop in stops)
        self._stride = max(map(len, stops), default=0) + 1
        self._shorter = array("I", [_UNKNOWN]) * (len(self._stops) * self._stride)
        """For each state, the state of its longest proper suffix."""
        self._ends = bytearray(len(self._shorter))
        """For each state, whether a stop string ends there."""
        self._state = _NOTHING
        self._held = ""
        self._num_early = 0
        """How many of the characters of `_held` came before a stop string might end."""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> str:
        """The text that cannot belong to a stop string; empty once `matched` is set. If not `may_end`, a stop string
        that ends within this text has no effect. One that only begins within it still counts."""
        if self.matched is not None:
            return ""
        if self._state == _NOTHING and self._initials.isdisjoint(text):
            return text
        text, num_held = self._held + text, len(self._held)
        if not may_end:
            self._num_early = len(text)
        for character in text[num_held:]:
            self._state = self._after(self._state, character)
            if may_end and self._state != _NOTHING and self._ends[self._state]:
                return self._end(text)
        while self._is_no_beginning(self._state):
            self._state = self._shorter[self._state]
        num_free = len(text) - self._state % self._stride
        self._held, self._num_early = text[num_free:], max(0, self._num_early - num_free)
        return text[:num_free]

    def flush(self) -> str:
        """The text that is still held back, which turned out not to be a stop string."""
        self._state, self._num_early = _NOTHING, 0
        held, self._held = self._held, ""
        return held

    def _end(self, text: str) -> str:
        """The text before the earliest stop string."""
        earliest = ((text.find(stop, max(0, self._num_early + 1 - len(stop))), stop) for stop in self._stops)
        at, self.matched = min((at, stop) for at, stop in earliest if at >= 0)
        self._held = ""
        return text[:at]

    def _is_no_beginning(self, state: int) -> bool:
        """Whether this is a whole stop string, and not the beginning of a longer one."""
        first, length = divmod(state, self._stride)
        if length == 0 or length < len(self._stops[first]):
            return False
        return first + 1 == len(self._stops) or not self._stops[first + 1].startswith(self._stops[first])

    def _after(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (longer := self._longer(state, character)) == _NOTHING and state != _NOTHING:
            state = self._shorter[state]
        return longer

    def _longer(self, state: int, character: str) -> int:
        """The state of the text with one more character; _NOTHING if no stop string begins with it."""
        first, length = divmod(state, self._stride)
        stop = self._stops[first]
        if stop[length : length + 1] != character:
            beginning = stop[:length] + character
            first = bisect_left(self._stops, beginning, first)
            if first == len(self._stops) or not self._stops[first].startswith(beginning):
                return _NOTHING
            stop = self._stops[first]
        longer = first * self._stride + length + 1
        if self._shorter[longer] == _UNKNOWN:
            shorter = self._after(self._shorter[state], character) if state != _NOTHING else _NOTHING
            self._shorter[longer] = shorter
            self._ends[longer] = len(stop) == length + 1 or self._ends[shorter]
        return longer


class TextStream:
    """Turns the tokens of one request's answer into text, up to a stop string."""

    def __init__(
        self,
        backend: "RustTokenizer",
        stops: Sequence[str],
        min_tokens: int,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
        kept_tokens: Mapping[int, str] = NO_TOKENS,
    ) -> None:
        """`kept_tokens`: see Detokenizer."""
        self.new_detokenizer: Callable[[], Detokenizer] = partial(
            Detokenizer, backend, skip_special_tokens, prompt_token_ids, kept_tokens
        )
        """Creates another Detokenizer, which gives the same text from the first token on."""
        self.new_stream: Callable[[], TextStream] = partial(
            TextStream, backend, stops, min_tokens, skip_special_tokens, prompt_token_ids, kept_tokens
        )
        """Creates another TextStream, which is empty."""
        self._detokenizer = self.new_detokenizer()
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int], stop_token_id: int | None = None) -> tuple[int, str]:
        """The number of tokens that count, and the text that they add. Tokens after a stop string do not count.
        `stop_token_id`: the last token, if it ends the answer as an end-of-sequence or stop token. It adds no text."""
        pieces = []
        for index, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            is_end = index == len(token_ids) and token_id == stop_token_id
            text = (
                "" if is_end and not self._detokenizer.keeps(token_id) else self._detokenizer.push(token_id)
            )
            pieces.append(self._stops.push(text, self._may_end))
            if self._stops.matched is not None:
                return index, "".join(pieces)
        return len(token_ids), "".join(pieces)

    def flush(self) -> str:
        """The rest of the text. Call this when no more tokens follow."""
        return self._stops.push(self._detokenizer.flush(), self._may_end) + self._stops.flush()

    @property
    def _may_end(self) -> bool:
        """Whether a stop string may end the answer at the last token."""
        return self._num_tokens > self._min_tokens
