"""What a gateway and the process that tries its grammars say to each other, and how it travels through their pipes."""

from dataclasses import dataclass

from baton.messages.wire import Codec
from baton.sampling import StructuredOutput

HEADER_BYTES = 4
"""In front of each message: its length, big-endian."""

CPU_LIMIT_S = 1.0
"""For compiling one grammar. Ordinary ones take a hundredth of it at most."""
FOLLOW_LIMIT_S = 0.25
"""For its first tokens, whose masks a worker computes between two steps. Ordinary ones take a hundredth of it, too."""
MEMORY_LIMIT_BYTES = 512 * 2**20
"""What a compiling process may map beside what it was born with."""
STACK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class TryGrammar:
    """Compile this grammar. Numbers count up from 1."""

    number: int
    output: StructuredOutput


@dataclass(frozen=True, slots=True)
class GrammarTried:
    """It compiled, or `error` says why it never will."""

    number: int
    error: str | None


@dataclass(frozen=True, slots=True)
class GrammarEndedProcess:
    """The compiling process ended while it worked on the grammar, which is not tried again; another one goes on."""

    number: int
    signal: int
    """What ended it; 0: it exited."""


Message = TryGrammar | GrammarTried | GrammarEndedProcess

_CODEC = Codec[Message](TryGrammar, GrammarTried, GrammarEndedProcess, max_bytes=2**20)


def pack(message: Message) -> bytes:
    """With its header."""
    data = _CODEC.encode(message)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def unpack(data: bytes) -> Message:
    """Without its header; WireError if it is none of these."""
    return _CODEC.decode(data)
