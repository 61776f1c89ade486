"""A process that compiles grammars for a gateway, so that a hostile grammar ends this process and nothing else.

    python -m engine.grammars.process TOKENIZER_FILE VOCAB_SIZE EOS_TOKEN_ID[,...]

    parent    loads the tokenizer once, forks, waits, reports which grammar ended a child, forks again
    child     reads grammars from stdin one by one, answers on stdout; has limited time, memory and stack

A forked child already has the tokenizer, so a child is replaced within milliseconds. A child also matches a
few tokens, with a shorter limit of time, since some grammars compile quickly, but then need seconds and a gigabyte
for a token. Knows no gateway; parent and child end when stdin closes.
"""

import contextlib
import mmap
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from baton.messages.grammar_check import (
    COMPILED_LIMIT_BYTES,
    CPU_LIMIT_S,
    FOLLOW_LIMIT_S,
    HEADER_BYTES,
    MEMORY_LIMIT_BYTES,
    STACK_BYTES,
    GrammarEndedProcess,
    GrammarTried,
    TryGrammar,
    pack,
    unpack,
)
from baton.sampling import StructuredOutput
from baton.system.parent import end_with_parent
from engine.grammars.library import GrammarLibrary, complaint_of, in_one_line, start_thread_with_stack

NUM_FOLLOWED_TOKENS = 8
ORDINARY_CHARACTERS = 4_000
ORDINARY_CPU_S = 0.01
"""The longest compile time of an ordinary grammar. Ordinary grammars are cheap to match, so they are answered
once the first token is known to exist, before the child has matched tokens."""
MAX_GRAMMARS_PER_CHILD = 1_000
"""A child that has answered this many grammars is replaced, since its memory grows: a new child uses no more than the
parent."""

EXIT_NO_MORE_GRAMMARS = 0
EXIT_REPLACE = 75


def main(arguments: list[str]) -> int:
    """Runs the parent process; returns the exit code."""
    file, vocab_size, eos_token_ids = arguments
    library = GrammarLibrary(
        Path(file), int(vocab_size), tuple(map(int, filter(None, eos_token_ids.split(","))))
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, whose end ends this process
    with contextlib.suppress(ValueError):  # each grammar reports the error
        library.load_tokenizer()
    under_way = NumberUnderWay()
    while True:
        child = os.fork()
        if child == 0:
            serve_grammars(library, under_way)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if under_way.number:
            write(pack(GrammarEndedProcess(under_way.number, max(0, -code))))
            under_way.number = 0
        elif code >= 0 and code != EXIT_REPLACE:
            return code


class NumberUnderWay:
    """The number of the child's present grammar, 0 if none; the parent can read it after the child's end."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def number(self) -> int:
        (number,) = struct.unpack("Q", self._memory[:8])
        return int(number)

    @number.setter
    def number(self, number: int) -> None:
        self._memory[:8] = struct.pack("Q", number)


def serve_grammars(library: GrammarLibrary, under_way: NumberUnderWay) -> None:
    """A child's whole run; does not return."""
    code = 1

    def run() -> None:
        nonlocal code
        code = answer_grammars(library, under_way)

    try:
        end_with_parent()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crashing library must not fill a log
        set_limits()
        start_thread_with_stack(STACK_BYTES, run).join()
    finally:
        os._exit(code)


def set_limits() -> None:
    """Forbids core dumps, and on Linux limits the memory: an allocation beyond the limit ends this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + STACK_BYTES + MEMORY_LIMIT_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer_grammars(library: GrammarLibrary, under_way: NumberUnderWay) -> int:
    """Answers grammars until stdin ends or the child has answered enough; returns the exit code."""
    for _ in range(MAX_GRAMMARS_PER_CHILD):
        job = read_grammar()
        if job is None:
            return EXIT_NO_MORE_GRAMMARS
        under_way.number = job.number
        began = time.process_time()
        matcher, error = compile_within_limits(library, job.output)
        is_ordinary = (
            len(job.output.source) <= ORDINARY_CHARACTERS and time.process_time() - began <= ORDINARY_CPU_S
        )
        if matcher is not None:
            error = follow(matcher, 0 if is_ordinary else NUM_FOLLOWED_TOKENS)
        write(pack(GrammarTried(job.number, error)))
        if matcher is not None and error is None and is_ordinary:
            follow(matcher, NUM_FOLLOWED_TOKENS)
        under_way.number = 0
    return EXIT_REPLACE


def compile_within_limits(library: GrammarLibrary, output: StructuredOutput) -> tuple[Any, str | None]:
    """A matcher, or why there is none. SIGPROF ends the process if it exceeds its time limit."""
    limit_cpu_time()
    try:
        compiled = library.compile(output)
        if compiled.num_bytes > COMPILED_LIMIT_BYTES:
            return None, (
                f"the grammar is too complex: the compiled grammar takes {compiled.num_bytes >> 20} MiB of memory; at "
                f"most {COMPILED_LIMIT_BYTES >> 20} MiB are allowed"
            )
        return compiled.matcher, None
    except ValueError as error:
        return None, str(error)
    except BaseException as error:  # a panic of the library is no Exception
        return None, in_one_line(str(error)) or type(error).__name__
    finally:
        limit_cpu_time(0.0)


def follow(matcher: Any, num_tokens: int) -> str | None:
    """Matches a few tokens. Beyond the limits, the process ends. Returns why no token can be the first one, or None.

    Each time, it matches the allowed token with the highest id: the one with the lowest id may be end-of-sequence.
    """
    error = None
    limit_cpu_time(FOLLOW_LIMIT_S)
    with contextlib.suppress(
        Exception
    ):  # a panic is no Exception: it ends this process, and the grammar is refused
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            error = complaint_of(matcher) or "no text can match the grammar"
        for _ in range(num_tokens):
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]
            if not len(allowed) or not matcher.consume_token(int(allowed[-1])) or matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
    limit_cpu_time(0.0)
    return error


def limit_cpu_time(limit_s: float = CPU_LIMIT_S) -> None:
    """Limits this process' CPU time from now on; 0: no limit. Beyond it, the system sends SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def read_grammar() -> TryGrammar | None:
    """The next grammar; None once stdin has ended."""
    header = read(HEADER_BYTES)
    data = read(int.from_bytes(header, "big")) if header else b""
    if not data:
        return None
    message = unpack(data)
    assert isinstance(message, TryGrammar)
    return message


def read(num_bytes: int) -> bytes:
    """Reads exactly this many bytes from stdin; returns no bytes if stdin ends earlier.

    Reads without a buffer, since a buffer's content would be lost with this process.
    """
    data = b""
    while len(data) < num_bytes and (part := os.read(0, num_bytes - len(data))):
        data += part
    return data if len(data) == num_bytes else b""


def write(data: bytes) -> None:
    """Writes all of `data` to stdout."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
