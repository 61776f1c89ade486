"""A process that compiles grammars for a gateway, so that a hostile one ends this process and nothing else.

    python -m engine.compile_process TOKENIZER_FILE VOCAB_SIZE EOS_TOKEN_ID[,...]

    parent    loads the tokenizer once, forks, waits, says which grammar ended a child, forks again
    child     reads grammars from stdin, one at a time, and answers on stdout; its time, memory and stack are limited

A fork has the tokenizer already, so a child that ended is replaced within milliseconds. After its answer a child
follows the grammar for a few tokens: some compile quickly and cannot be matched within the limits. Knows no gateway;
both end when stdin does.
"""

import contextlib
import mmap
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from baton.grammar_check import (
    CPU_LIMIT_S,
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
from engine.compile_grammar import GrammarLibrary, in_one_line, thread_with_stack

NUM_FOLLOWED_TOKENS = 8
MAX_GRAMMARS_PER_CHILD = 1_000
"""Then another one takes its place, with the memory that the parent has."""

EXIT_NO_MORE_GRAMMARS = 0
EXIT_REPLACE = 75


def main(arguments: list[str]) -> int:
    """The exit code."""
    file, vocab_size, eos_token_ids = arguments
    library = GrammarLibrary(
        Path(file), int(vocab_size), tuple(map(int, filter(None, eos_token_ids.split(","))))
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, whose end is ours
    with contextlib.suppress(ValueError):  # every grammar will be told
        library.load_tokenizer()
    under_way = NumberUnderWay()
    while True:
        child = os.fork()
        if child == 0:
            serve_grammars(library, under_way)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            if os.WEXITSTATUS(status) == EXIT_REPLACE:
                continue
            return os.WEXITSTATUS(status)
        if number := under_way.number:
            under_way.number = 0
            write(pack(GrammarEndedProcess(number, os.WTERMSIG(status))))


class NumberUnderWay:
    """Which grammar a child works on, where its parent can read it after the child's end; 0: none."""

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
    """A child's whole life; does not return."""
    code = 1

    def run() -> None:
        nonlocal code
        code = answer_grammars(library, under_way)

    try:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # clients must not fill a log with what a library says at its end
        set_limits()
        thread_with_stack(STACK_BYTES, run, "grammar").join()
    finally:
        os._exit(code)


def set_limits() -> None:
    """No core dumps, and a bound to memory: an allocation beyond it ends this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + STACK_BYTES + MEMORY_LIMIT_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer_grammars(library: GrammarLibrary, under_way: NumberUnderWay) -> int:
    """The exit code, once stdin ends or it has answered enough."""
    for _ in range(MAX_GRAMMARS_PER_CHILD):
        job = read_grammar()
        if job is None:
            return EXIT_NO_MORE_GRAMMARS
        under_way.number = job.number
        matcher, error = compile_within_limits(library, job.output)
        write(pack(GrammarTried(job.number, error)))
        if matcher is not None:
            follow(matcher)
        under_way.number = 0
    return EXIT_REPLACE


def compile_within_limits(library: GrammarLibrary, output: StructuredOutput) -> tuple[Any, str | None]:
    """A matcher, or why there is none. SIGPROF ends the process where it takes longer than its limit."""
    limit_cpu_time()
    try:
        return library.compile(output), None
    except ValueError as error:
        return None, str(error)
    except BaseException as error:  # a panic of the library is no Exception
        return None, in_one_line(str(error)) or type(error).__name__
    finally:
        limit_cpu_time(0.0)


def follow(matcher: Any) -> None:
    """Matches a few tokens, each the first that is allowed: within the limits it returns, otherwise it does not."""
    limit_cpu_time()
    with contextlib.suppress(Exception):
        for _ in range(NUM_FOLLOWED_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0]
            if not len(allowed) or not matcher.consume_token(int(allowed[0])) or matcher.is_stopped():
                break
    limit_cpu_time(0.0)


def limit_cpu_time(limit_s: float = CPU_LIMIT_S) -> None:
    """Of this process from now on; 0: none. The system ends it with SIGPROF, whatever code it is in."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def read_grammar() -> TryGrammar | None:
    """The next one; None once stdin has ended."""
    header = read(HEADER_BYTES)
    data = read(int.from_bytes(header, "big")) if header else b""
    if not data:
        return None
    message = unpack(data)
    assert isinstance(message, TryGrammar)
    return message


def read(num_bytes: int) -> bytes:
    """Exactly so many from stdin, without a buffer that would end with this process; fewer once it has ended."""
    data = b""
    while len(data) < num_bytes and (part := os.read(0, num_bytes - len(data))):
        data += part
    return data if len(data) == num_bytes else b""


def write(data: bytes) -> None:
    """To stdout, all of it."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
