"""GrammarLibrary: makes a matcher from a model's tokenizer and a grammar; the only user of llguidance.

A hostile grammar may end the process that compiles it: the library recurses once for each link between rules,
and a stack overflow ends the process. So gateways test each grammar in an expendable process. The library is
imported with the first grammar, so machines without structured outputs need not have it.
"""

import ctypes
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.sampling import GrammarKind, StructuredOutput

MAX_COMPLAINT_CHARACTERS = 300
MAX_SHOWN_PATTERN = 100
_WRONG_REGEX = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)(\^+)\nerror: (.*)")
"""The library's error about a regular expression of one line: the expression, and marks below the wrong part."""
LEAST_BYTES = 100_000
BYTES_PER_CHARACTER = 40
"""Lower bounds for the memory of a compiled grammar. Measured grammars took at least 0.09 MiB, and up to 200
bytes per character."""

ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""The library's advice to use an option that clients do not have; BETTER_ADVICE replaces it."""
BETTER_ADVICE = "Use anyOf, or give every alternative a required property with a `const` of its own"

COLD_MASK_S = 0.0005
BYTES_PER_COLD_S = 100_000_000
"""A mask that takes longer than COLD_MASK_S mostly builds states of the grammar's automaton. In measurements, a second
of this work took 40 to 220 MB."""
LEAST_GROWTH_BYTES = 8 * 2**10
"""Every mask counts as at least this much growth. A mask of a long string takes little time, but may add 14 KB."""
MAX_GROWTH_BYTES = 32 * 2**20
"""A grammar that has grown by more bytes is compiled again for the next request. The library allows all requests of a
compiled grammar together 250,000 states, which take 110 to 130 MB."""

TOO_MANY_STATES = "too many states"
"""The library's words for an automaton at its limit."""
NO_WAY_ON = "NoExtensionBias"
"""The library's word for a matcher that is not at an end and allows no token."""


@dataclass(slots=True)
class Compiled:
    """A grammar that can be matched. All copies of its matcher share an automaton, which grows while they match."""

    matcher: Any
    """An llguidance.LLMatcher at its start."""
    first_bytes: int
    """The memory that it took at first; only an estimate if other threads allocated or freed memory meanwhile."""
    grown_bytes: int = 0
    """An estimate of the memory that it has taken since then."""
    has_failed: bool = False
    """Whether the automaton has reached a limit of the library, or the library has panicked. Then other copies of the
    matcher fail, too."""

    @property
    def num_bytes(self) -> int:
        return self.first_bytes + self.grown_bytes

    @property
    def is_worn(self) -> bool:
        """Whether the next request needs a newly compiled grammar."""
        return self.has_failed or self.grown_bytes > MAX_GROWTH_BYTES

    def add_mask_time(self, cpu_s: float) -> None:
        """Estimates how much the automaton grew while a mask was computed for this time."""
        self.grown_bytes += max(LEAST_GROWTH_BYTES, int((cpu_s - COLD_MASK_S) * BYTES_PER_COLD_S))


class GrammarLibrary:
    """Compiles grammars; only one thread may use it at a time."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """The file is read when the first grammar is compiled, or by `load_tokenizer`."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        # A tokenizer may have more tokens than the model; llguidance would refuse these, and no model samples them.
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer: Any = None

    def load_tokenizer(self) -> Any:
        """llguidance's own tokenizer, made once. Raises ValueError if this model cannot have structured outputs."""
        if self._tokenizer is None:
            if not self._eos_token_ids:
                raise ValueError("this model has no end-of-sequence token, which structured outputs need")
            try:
                tokenizer = self._tokenizer_file.read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"cannot read this model's tokenizer: {error}") from error
            import llguidance

            self._tokenizer = llguidance.LLTokenizer(
                tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        return self._tokenizer

    def compile(self, output: StructuredOutput) -> Compiled:
        """Compiles a grammar. Raises ValueError with the library's complaint about it."""
        import llguidance

        tokenizer, before = self.load_tokenizer(), heap_bytes()
        matcher = llguidance.LLMatcher(tokenizer, _to_grammar(output), log_level=0)
        if matcher.is_error():
            raise ValueError(in_one_line(matcher.get_error()))
        return Compiled(
            matcher, max(LEAST_BYTES, BYTES_PER_CHARACTER * len(output.source), heap_bytes() - before)
        )


def start_thread_with_stack(stack_bytes: int, run: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread with this stack. Threads started elsewhere at the same moment may get such a stack,
    too."""
    thread = threading.Thread(target=run, name="grammar", daemon=True)
    former = threading.stack_size(stack_bytes)
    try:
        thread.start()
    finally:
        threading.stack_size(former)
    return thread


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def heap_bytes() -> int:
    """Memory in use on the C library's heap, by all threads of this process (mallinfo(3)); 0 if unknown."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # no glibc, or one before 2.33
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def complaint_of(matcher: Any) -> str:
    """Why a matcher can go no further, if a limit of the library is the reason; empty if the grammar allows no
    further token."""
    complaint, _, _ = str(matcher.get_error()).partition("<state>")
    return "" if NO_WAY_ON in complaint else in_one_line(complaint)


def in_one_line(message: str) -> str:
    """Joins the lines of the library's errors. Describes a drawing of a wrong regular expression in words, and leaves
    out the drawing of the grammar's line that follows."""
    if drawing := _WRONG_REGEX.search(message):
        before = message[: drawing.start()]
        if before.endswith(
            " (in regex): "
        ):  # the whole expression of a schema, which the drawing shows again
            before, _, _ = before.partition("invalid regex ")
        message = before + _in_words(drawing)
    return " ".join(message.split()).replace(ADVICE, BETTER_ADVICE)[:MAX_COMPLAINT_CHARACTERS]


def _in_words(drawing: re.Match[str]) -> str:
    pattern, spaces, marks, problem = drawing.groups()
    part = pattern[len(spaces) : len(spaces) + len(marks)]
    shown = pattern if len(pattern) <= MAX_SHOWN_PATTERN else f"{pattern[:MAX_SHOWN_PATTERN]}..."
    return (
        f"invalid regex: {problem}: '{part[:MAX_SHOWN_PATTERN]}' at character {len(spaces) + 1} of the pattern "
        f"'{shown}'; rewrite the pattern without it, or leave the pattern out"
    )


def _to_grammar(output: StructuredOutput) -> str:
    """The grammar in llguidance's own serialization; ValueError for invalid JSON."""
    from llguidance import LLMatcher

    match output.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                schema = json.loads(output.source)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"the schema is not valid JSON: {error}") from error
            if not isinstance(schema, dict):
                raise ValueError(f"a schema must be a JSON object, got {type(schema).__name__}")
            # As text, since the library takes no integers of more than 64 bits from Python.
            return str(LLMatcher.grammar_from_json_schema(output.source))
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(output.source))
        case GrammarKind.LARK:
            return str(LLMatcher.grammar_from_lark(output.source))
