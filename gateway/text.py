"""Text to tokens and back, with the model's own tokenizer; knows no request and no worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from baton.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class Tokenizer:
    """A model folder's tokenizer and chat template. Encoding is safe from any thread."""

    def __init__(self, folder: Path) -> None:
        """Takes seconds, since it imports transformers: call it off the event loop."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} has no tokenizer that can be loaded: {error}") from error
        self.backend: RustTokenizer = self._tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids with the special tokens that the model expects around a text."""
        return tuple(self.backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Renders the conversation up to where the assistant speaks next; InvalidRequest names `chat`."""
        if not self.has_chat_template:
            raise InvalidRequest(
                "chat", "this model's tokenizer has no chat template; send text or token ids"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise InvalidRequest("chat", f"the model's chat template refuses it: {error}") from error
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)


class Detokenizer:
    """Turns one request's tokens into text as they come, never cutting a character in two."""

    def __init__(self, backend: "RustTokenizer", skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:
            # DecodeStream raises a bare one when bytes that are no character change text it has shown already,
            # as byte-fallback tokenizers can. Shown text stays; decoding starts afresh behind it.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self.flush()
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """What is left when no more tokens come; bytes that are no character become U+FFFD."""
        text = self._backend.decode(self._pending, skip_special_tokens=self._skip_special_tokens)
        self._pending.clear()
        return str(text)


class StopStrings:
    """Looks for stop strings in a stream of text, holding back whatever could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show. Once `matched` is set, nothing more is."""
        if self.matched is not None:
            return ""
        text = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Tokens in, text out, ended by a stop string: one request's view of its own output."""

    def __init__(
        self, backend: "RustTokenizer", stops: Sequence[str], min_tokens: int, skip_special_tokens: bool
    ) -> None:
        self._detokenizer = Detokenizer(backend, skip_special_tokens)
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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
