"""Messages between a gateway and the process that tests its grammars, and their framing in pipes."""

from dataclasses import dataclass

from baton.messages.wire import Codec
from baton.sampling import StructuredOutput

HEADER_BYTES = 4
"""Each message is preceded by its length, big-endian."""

CPU_LIMIT_S = 1.0
"""Limit for compiling one grammar. Ordinary grammars take at most a hundredth of it."""
FOLLOW_LIMIT_S = 0.25
"""Limit for the masks of a grammar's first tokens, which a worker computes between two steps. Ordinary grammars take at
most a hundredth of it."""
MEMORY_LIMIT_BYTES = 512 * 2**20
"""Memory that a compiling process may map beyond what it had at its start."""
STACK_BYTES = 32 * 2**20
COMPILED_LIMIT_BYTES = 64 * 2**20
"""Memory for one compiled grammar. Ordinary grammars use a hundredth of it, a schema of 3,000 properties a fifth."""


@dataclass(frozen=True, slots=True)
class TryGrammar:
    """Compile this grammar. `number`: these messages are numbered from 1."""

    number: int
    output: StructuredOutput


@dataclass(frozen=True, slots=True)
class GrammarTried:
    """The grammar compiled, or `error` says why it never will."""

    number: int
    error: str | None


@dataclass(frozen=True, slots=True)
class GrammarEndedProcess:
    """The compiling process died on this grammar, which is not retried; a new process takes over."""

    number: int
    signal: int
    """The signal that ended the process; 0 if it exited."""


Message = TryGrammar | GrammarTried | GrammarEndedProcess

_CODEC = Codec[Message](TryGrammar, GrammarTried, GrammarEndedProcess, max_bytes=2**20)


def pack(message: Message) -> bytes:
    """One message with its header."""
    data = _CODEC.encode(message)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def unpack(data: bytes) -> Message:
    """Decodes a message without its header; WireError for any other bytes."""
    return _CODEC.decode(data)
