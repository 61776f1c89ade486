"""Structured output: grammars are compiled on a thread of their own, then each guides one request token by token.

Knows llguidance, and nobody else does; knows no scheduler and no logits.
"""

import json
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from baton.sampling import GrammarKind, StructuredOutput

logger = logging.getLogger(__name__)

MAX_COMPLAINT_CHARACTERS = 300
MAX_GRAMMARS = 256
"""Compiled grammars that are kept, the latest used: clients tend to repeat theirs, and many may wait for their turn."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """News: this grammar can be matched now, or `error` says why it never can."""

    output: StructuredOutput
    error: str | None = None


class Matcher:
    """One request's way through its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_consumed = 0

    def consume(self, token_id: int) -> str | None:
        """Moves on by one sampled token; why that is not possible, or None if it was."""
        self._num_consumed += 1
        return None if self._matcher.consume_token(token_id) else self._error(token_id)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size]: which tokens may come next. Once the grammar is complete, only end-of-sequence."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(np.bool_)
        return np.pad(allowed, (0, self._vocab_size - len(allowed)))

    def allowed_words(self) -> npt.NDArray[np.int32]:
        """The same as bits: bit b of word w is token 32 w + b. What lies behind the vocabulary means nothing."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        num_bytes = min(len(mask), words.nbytes)
        words.view(np.uint8)[:num_bytes] = mask[:num_bytes]
        return words

    def rewind(self, num_tokens: int) -> None:
        """Back to where it was after the first `num_tokens` tokens: the others are to be sampled again."""
        if self._num_consumed > num_tokens:
            self._matcher.rollback(self._num_consumed - num_tokens)
            self._num_consumed = num_tokens

    def _error(self, token_id: int) -> str:
        return f"the structured output cannot go on with token {token_id}: {_in_one_line(self._matcher.get_error())}"


class GrammarCompiler:
    """Compiles grammars, each once, whoever asks for it; knows no request.

    The engine's thread orders them and hears of them, a thread of its own compiles, the device's thread asks for
    matchers.
    """

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        on_news: Callable[[], None],
    ) -> None:
        """Thread and tokenizer wait for the first grammar; `on_news` is called from the compiler's thread."""
        self._tokenizer_file = model_path / "tokenizer.json"
        self.vocab_size = vocab_size
        """Of the model."""
        self._eos_token_ids = eos_token_ids
        self._on_news = on_news
        self._jobs: queue.SimpleQueue[StructuredOutput | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CompiledGrammar] = queue.SimpleQueue()
        self._wanted: frozenset[StructuredOutput] = frozenset()
        self._is_closing = False
        self._lock = threading.Lock()
        """Guards the two below."""
        self._compiled: dict[StructuredOutput, Any] = {}
        self._tokenizer: Any = None
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Ends the thread after the grammar it is at."""
        self._is_closing = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def compile(self, output: StructuredOutput) -> None:
        """Returns at once; `take_news` names the grammar when it is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
            self._thread.start()
        self._wanted |= {output}
        self._jobs.put(output)

    def keep_only(self, wanted: frozenset[StructuredOutput]) -> None:
        """Nobody waits for any other grammar any more: those that were ordered are passed over."""
        self._wanted = wanted

    def take_news(self) -> list[CompiledGrammar]:
        """What ended since the last call."""
        news = []
        while not self._done.empty():
            news.append(self._done.get())
        if news:
            self._wanted -= {grammar.output for grammar in news}
        return news

    def matcher(self, output: StructuredOutput) -> Matcher:
        """At the start of a grammar that was named as compiled; compiles it again if it was not kept."""
        return Matcher(self._compile(output).deep_copy(), self.vocab_size)

    def _run(self) -> None:
        while (output := self._jobs.get()) is not None and not self._is_closing:
            if output in self._wanted:
                self._done.put(CompiledGrammar(output, self._error_of(output)))
                self._on_news()

    def _error_of(self, output: StructuredOutput) -> str | None:
        try:
            self._compile(output)
        except ValueError as error:
            return f"structured_output: {error}"
        except Exception as error:  # the edge to a foreign library: one grammar must not end them all
            logger.exception("compiling a grammar failed")
            return f"structured_output: {error}"
        return None

    def _compile(self, output: StructuredOutput) -> Any:
        """A matcher that is only ever copied. Raises ValueError with the library's complaint about the grammar."""
        with self._lock:
            compiled = self._compiled.pop(output, None)
            tokenizer = self._load_tokenizer()
        if compiled is None:
            compiled = llguidance.LLMatcher(tokenizer, _to_grammar(output), log_level=0)
            if compiled.is_error():
                raise ValueError(_in_one_line(compiled.get_error()))
        with self._lock:
            self._compiled[output] = compiled  # last in the dict: used most recently
            while len(self._compiled) > MAX_GRAMMARS:
                del self._compiled[next(iter(self._compiled))]
        return compiled

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            if not self._eos_token_ids:
                raise ValueError("this model has no end-of-sequence token, which ends a structured output")
            try:
                tokenizer = self._tokenizer_file.read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"this model's tokenizer cannot be read: {error}") from error
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer, n_vocab=self.vocab_size, eos_token=list(self._eos_token_ids)
            )
        return self._tokenizer


def _to_grammar(output: StructuredOutput) -> str:
    """llguidance's own serialisation; ValueError for JSON that is none."""
    match output.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                schema = json.loads(output.source)
            except json.JSONDecodeError as error:
                raise ValueError(f"the schema is not JSON: {error}") from error
            if not isinstance(schema, dict):
                raise ValueError(f"a schema is a JSON object, got {type(schema).__name__}")
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema))
        case GrammarKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(output.source))
        case GrammarKind.LARK:
            return str(llguidance.LLMatcher.grammar_from_lark(output.source))


def _in_one_line(message: str) -> str:
    """The library's complaints draw pictures over several lines."""
    return " ".join(message.split())[:MAX_COMPLAINT_CHARACTERS]
