"""Structured output: a thread compiles grammars; then a matcher guides each request token by token.

A gateway compiles every grammar in a process of its own before a worker sees it (`gateway/grammars/`), with less
time, memory and stack than here. Knows no scheduler and no logits.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.clock import Clock
from baton.sampling import StructuredOutput
from baton.system.progress import Progress
from baton.system.turns import FairTurns
from engine.grammars.library import (
    TOO_MANY_STATES,
    Compiled,
    GrammarLibrary,
    complaint_of,
    in_one_line,
    start_thread_with_stack,
)

logger = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 60.0
"""If one grammar takes this long to compile, the worker ends: something is wrong, since gateways refuse grammars that
take over a second."""
MAX_TOKENS_LOOKED_AT = 10_000
"""The search for forced tokens ends once it has looked at this many tokens, after about 10 ms. For each forced token,
the library looks at all the forced text that remains."""
MAX_KEPT_BYTES = 256 * 2**20
"""Of the compiled grammars that no request uses, the most recently used ones are kept, up to this size in total:
clients tend to repeat grammars. An ordinary grammar takes 0.1 to 0.4 MiB."""
STACK_BYTES = 256 * 2**20
"""Stack of the compiling thread, eight times a gateway's limit. Only the used part takes memory."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar whose compilation has ended: it can be matched now, or `error` says why it never can."""

    output: StructuredOutput
    error: str | None = None


class Matcher:
    """One request's state in its grammar. A defect of the library fails this request, not the worker."""

    def __init__(self, compiled: Compiled, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer`: the matcher's llguidance.LLTokenizer."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []
        """The consumed tokens."""
        self._may_try_drafts = True
        """False once no token could follow a draft. Going back from there takes long, so no other draft is tried."""
        self._defect: str | None = None
        self._num_at_first_mask: int | None = None
        """Number of consumed tokens when the first mask was computed."""
        self._found_limit = False
        """Whether this matcher was the first one that failed at a limit of the compiled grammar."""

    @property
    def may_begin_anew(self) -> bool:
        """After a token that was not consumed: whether a newly compiled grammar may continue the answer.

        This is so if the present compiled grammar is at a limit. The matcher that found the limit has one more
        condition: its answer has grown since its first mask. So with each compilation, an answer grows or ends.
        """
        if not self._found_limit:
            return self._compiled.has_failed
        begun = self._num_at_first_mask
        return begun is not None and len(self._token_ids) - 1 > begun

    def consume(self, token_id: int) -> str | None:
        """Advances by one sampled token; returns why that is impossible, as "field: problem", or None."""
        self._token_ids.append(token_id)
        if self._defect is None:
            try:
                return None if self._matcher.consume_token(token_id) else self._error(token_id)
            except BaseException as error:  # a panic of the library is no Exception
                self._set_defect(error)
        return f"structured_output: the answer cannot continue: {self._defect}"

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows next; perhaps fewer."""
        if self._defect is None and self._may_try_drafts:
            try:
                return int(self._matcher.validate_tokens(list(token_ids)))
            except BaseException as error:  # also a panic, which is no Exception
                self._set_defect(error)
        return 0

    def take_forced(self, limit: int, stop_token_ids: Set[int]) -> tuple[int, ...]:
        """Advances as long as only one token is allowed, and returns these tokens.

        Stops after a token that ends the request, after `limit` tokens, and perhaps earlier in a long forced
        text.
        """
        forced: list[int] = []
        num_looked_at = 0
        try:
            while self._defect is None and len(forced) < limit and num_looked_at < MAX_TOKENS_LOOKED_AT:
                following = self._forced()
                if not following or not self._matcher.consume_token(following[0]):
                    break
                self._token_ids.append(following[0])
                forced.append(following[0])
                num_looked_at += len(following)
                if following[0] in stop_token_ids:
                    break
        except BaseException as error:  # also a panic, which is no Exception
            self._set_defect(error)
        return tuple(forced)

    def allowed(self, drafts: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
        """[vocab_size]: which tokens may come next, or after these drafts.

        Once the grammar is complete, only end-of-sequence is allowed. If a draft is not allowed, the result
        for the tokens after it has no meaning.
        """
        bits = self.allowed_words(drafts).view(np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def allowed_words(self, drafts: Sequence[int] = ()) -> npt.NDArray[np.int32]:
        """The same as `allowed`, in bits: bit b of word w is token 32 w + b. Bits beyond the vocabulary have no
        meaning."""
        mask = np.frombuffer(self._mask(drafts), np.uint8)
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        num_bytes = min(len(mask), words.nbytes)
        words.view(np.uint8)[:num_bytes] = mask[:num_bytes]
        return words

    def rewind(self, num_tokens: int) -> None:
        """Returns to the state after the first `num_tokens` tokens; the others will be sampled again."""
        if len(self._token_ids) > num_tokens:
            self._matcher.rollback(len(self._token_ids) - num_tokens)
            del self._token_ids[num_tokens:]

    def _forced(self) -> list[int]:
        """The next forced tokens.

        Only the first token is certain: after it, the library may divide the text differently.
        """
        if not self._matcher.is_stopped():
            first, *rest = self._matcher.compute_ff_tokens() or [None]
            return [] if first is None else [self._ordinary(first), *rest]
        allowed: list[int] = np.flatnonzero(self.allowed()).tolist()
        return allowed if len(allowed) == 1 else []

    def _ordinary(self, token_id: int) -> int:
        """The first token of a forced text, given the library's choice. If the text begins with the text of a special
        token, the library chooses this token, although the grammar allows only ordinary tokens."""
        if not self._tokenizer.is_special_token(token_id) or self._matcher.validate_tokens([token_id]):
            return token_id
        text = bytes(self._matcher.compute_ff_bytes()).decode(errors="ignore")
        return int(self._tokenizer.greedy_tokenize(text)[0])

    def _without_special(self, mask: bytes) -> bytes:
        """The mask before a forced text, with `_ordinary` applied."""
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        token_id = int(allowed.argmax())
        if (ordinary := self._ordinary(token_id)) == token_id:
            return mask
        allowed[[token_id, ordinary]] = 0, 1
        return np.packbits(allowed, bitorder="little").tobytes()

    def _mask(self, drafts: Sequence[int]) -> bytes:
        """The mask of allowed tokens, as bits.

        After a defect, the mask allows all tokens, and the next token then fails the request. The mask also allows all
        tokens after drafts that no token can follow. Such drafts may be wrong, so they are no defect.
        """
        if self._defect is None and (self._may_try_drafts or not drafts):
            try:
                num_consumed = self._matcher.try_consume_tokens(list(drafts)) if drafts else 0
                began = time.thread_time()
                mask = bytes(self._matcher.compute_bitmask())
                self._compiled.add_mask_time(time.thread_time() - began)
                if not self._matcher.is_error():
                    if self._num_at_first_mask is None:
                        self._num_at_first_mask = len(self._token_ids)
                    if self._matcher.compute_ff_bytes():
                        mask = self._without_special(mask)
                    if num_consumed:
                        self._matcher.rollback(num_consumed)
                    return mask
                # The mask allows the end, though the grammar is not complete.
                if drafts:
                    self._recover()
                else:
                    self._note_limit()
                    self._defect = complaint_of(self._matcher) or "no token can follow by its grammar"
            except BaseException as error:  # also a panic, which is no Exception
                self._set_defect(error)
        return b"\xff" * -(-self._vocab_size // 8)

    def _recover(self) -> None:
        """Makes the library's matcher anew: after an error it cannot go back."""
        self._may_try_drafts = False
        self._matcher = self._compiled.matcher.deep_copy()
        self._matcher.consume_tokens(self._token_ids)

    def _set_defect(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.error("matching a grammar failed", exc_info=error)
        self._note_failure()
        self._defect = in_one_line(str(error)) or type(error).__name__

    def _note_limit(self) -> None:
        if TOO_MANY_STATES in str(self._matcher.get_error()):
            self._note_failure()

    def _note_failure(self) -> None:
        self._found_limit |= not self._compiled.has_failed
        self._compiled.has_failed = True

    def _error(self, token_id: int) -> str:
        self._note_limit()
        complaint = complaint_of(self._matcher) or "no token can follow by its grammar"
        return f"structured_output: the answer cannot continue with token {token_id}: {complaint}"


class GrammarCompiler:
    """Compiles grammars, each only once even if several requests share it; knows no request.

    Callers take turns.

    The engine's thread requests compilations and collects results. A separate thread compiles. The device's
    thread requests matchers, and never compiles.
    """

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        on_compiled: Callable[[], None],
        clock: Clock,
    ) -> None:
        """The first grammar loads the tokenizer, and starts the thread unless `start` did. The thread calls
        `on_compiled`."""
        self.vocab_size = vocab_size
        """The model's vocabulary."""
        self.progress = Progress("its compiler of grammars", clock, PROGRESS_TIMEOUT_S)
        self._library = GrammarLibrary(model_path / "tokenizer.json", vocab_size, eos_token_ids)
        self._on_compiled = on_compiled
        self._changed = threading.Condition()
        """Guards `_turns`; notified of a new grammar and of the end."""
        self._turns = FairTurns[int, StructuredOutput]()
        self._done: queue.SimpleQueue[CompiledGrammar] = queue.SimpleQueue()
        self._wanted: frozenset[StructuredOutput] = frozenset()
        self._is_closing = False
        self._lock = threading.Lock()
        """Guards the next three fields."""
        self._compiled: dict[StructuredOutput, Compiled] = {}
        """The compiled grammars, the most recently used last."""
        self._num_bytes = 0
        """Bytes of all compiled grammars when the last one was requested."""
        self._is_evicted = True
        """Whether no grammar was requested since the last `evict`."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, once. Under load the system may have no free thread, which raises RuntimeError."""
        if self._thread is None:
            self._thread = start_thread_with_stack(STACK_BYTES, self._run)

    def close(self) -> None:
        """Ends the thread after its current grammar."""
        self._is_closing = True
        if self._thread is not None:
            with self._changed:
                self._changed.notify()
            self._thread.join()

    def compile(self, output: StructuredOutput, caller: int = 0) -> None:
        """Queues a grammar and returns at once; `take_compiled` returns the grammar when it is done.

        Callers take turns: another caller with many grammars delays this grammar by about one compilation.
        """
        self.start()
        self._wanted |= {output}
        with self._changed:
            self._turns.add(caller, output)
            self._changed.notify()

    def keep_only(self, wanted: frozenset[StructuredOutput]) -> None:
        """Skips all waiting grammars except `wanted`, since no request needs them."""
        self._wanted = wanted

    def take_compiled(self) -> list[CompiledGrammar]:
        """The grammars whose compilation has ended since the last call."""
        compiled = []
        while not self._done.empty():
            compiled.append(self._done.get())
        if compiled:
            self._wanted -= {grammar.output for grammar in compiled}
        return compiled

    @property
    def is_full(self) -> bool:
        """Whether the grammars take more than MAX_KEPT_BYTES. After `evict`, false until a grammar is requested."""
        return not self._is_evicted and self._num_bytes > MAX_KEPT_BYTES

    def evict(self, in_use: Set[StructuredOutput]) -> None:
        """Drops the least recently used grammars, until those that no unfinished request uses take at most
        MAX_KEPT_BYTES."""
        with self._lock:
            self._is_evicted = True
            self._num_bytes = sum(each.num_bytes for each in self._compiled.values())
            num_used = sum(self._compiled[output].num_bytes for output in in_use if output in self._compiled)
            excess, least_recent = self._num_bytes - num_used - MAX_KEPT_BYTES, []
            for output, compiled in self._compiled.items():
                if excess <= 0:
                    break
                if output not in in_use:
                    least_recent.append(output)
                    excess -= compiled.num_bytes
            for output in least_recent:
                self._num_bytes -= self._compiled.pop(output).num_bytes

    def matcher(self, output: StructuredOutput) -> Matcher | None:
        """A matcher at the start of a grammar reported as compiled; None once all requests that use it have ended."""
        compiled = self._find(output)
        if compiled is None:
            return None
        return Matcher(compiled, self._library.load_tokenizer(), self.vocab_size)

    def _run(self) -> None:
        while (turn := self._next_turn()) is not None:
            caller, output = turn
            if output in self._wanted:
                began = time.thread_time()
                self.progress.begin()
                self._done.put(CompiledGrammar(output, self._compile(output)))
                self._on_compiled()
                self.progress.end()
                with self._changed:
                    self._turns.charge(caller, time.thread_time() - began)

    def _next_turn(self) -> tuple[int, StructuredOutput] | None:
        """Waits for the next grammar and its caller; None at the end."""
        with self._changed:
            while not self._is_closing:
                if (turn := self._turns.take_next()) is not None:
                    return turn
                self._changed.wait()
        return None

    def _compile(self, output: StructuredOutput) -> str | None:
        """Compiles a grammar, unless it is compiled already and not worn; returns why that is impossible, or None."""
        try:
            compiled = self._find(output)
            if compiled is None or compiled.is_worn:
                compiled = self._library.compile(output)
            with self._lock:
                self._compiled[output] = compiled
                self._num_bytes = sum(each.num_bytes for each in self._compiled.values())
                self._is_evicted = False
        except ValueError as error:
            return f"structured_output: {error}"
        except BaseException as error:  # the edge to a foreign library, whose panics are no Exceptions
            logger.exception("compiling a grammar failed")
            return f"structured_output: {in_one_line(str(error))}"
        return None

    def _find(self, output: StructuredOutput) -> Compiled | None:
        """Finds a compiled grammar and marks it as most recently used. Callers must use a copy of its matcher."""
        with self._lock:
            compiled = self._compiled.pop(output, None)
            if compiled is not None:
                self._compiled[output] = compiled
        return compiled
