"""What producer and consumer of a hand-over say to each other, as typed values; knows no socket.

    consumer (decode)                      producer (prefill)
      Hold      ---------------------------->   my request waits for room; keep what you compute
      Open      ---------------------------->   I have room: send blocks from `first_block` on
                <----------------------------   Opened, or Refused
                <----------------------------   Block + payload, as they are computed
      Ack       ---------------------------->   one block is verified (or must be sent again)
                <----------------------------   End: that was all, and this is token 0
      Release   ---------------------------->   everything is verified; free your blocks
      Cancel    ---------------------------->   from any state; free your blocks
                <----------------------------   Aborted: from any state; there will be no more

Hold and Open are repeated while nothing else moves: they are the heartbeat that lengthens the lease, their answers are
the producer's sign of life, and an Open that lists what arrived heals every lost message.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import xxhash

from baton.errors import WireError
from baton.kv import KVFingerprint
from baton.request import FirstToken
from baton.wire import Codec

MAX_HEADER_BYTES = 1024 * 1024
SEAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class TransferKey:
    """The one identity of a hand-over. A restarted process is another incarnation, so nothing meant for it matches."""

    transfer_id: str
    attempt: int
    producer: str
    consumer: str


@dataclass(frozen=True, slots=True)
class Hold:
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Open:
    key: TransferKey
    fingerprint: KVFingerprint
    num_prompt_tokens: int
    first_block: int
    """Blocks before this one are in the consumer's prefix cache."""
    received: tuple[int, ...]
    """Blocks that arrived already; everything else is still wanted."""
    with_checksums: bool
    """The consumer compares checksums, so it decides whether they are computed."""


@dataclass(frozen=True, slots=True)
class Opened:
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Refused:
    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class Block:
    """Header of the payload frame that follows it."""

    key: TransferKey
    index: int
    """Position in the prompt's chain of blocks."""
    checksum: int | None
    """xxh3_64 of the payload; None where Open asked for none."""


@dataclass(frozen=True, slots=True)
class Ack:
    key: TransferKey
    index: int
    is_valid: bool


@dataclass(frozen=True, slots=True)
class End:
    key: TransferKey
    num_blocks: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class Release:
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Cancel:
    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class Aborted:
    key: TransferKey
    reason: str
    is_cancelled: bool
    """The request itself ended; otherwise only its prefill failed and the consumer may go on without."""


ToProducer = Hold | Open | Ack | Release | Cancel
ToConsumer = Opened | Refused | Block | End | Aborted

M = TypeVar("M")


class SealedCodec(Generic[M]):
    """A Codec whose frames begin with their own xxh3_64: a flipped bit in a token id must not pass either."""

    def __init__(self, *kinds: type[M]) -> None:
        self._codec: Codec[M] = Codec(*kinds, max_bytes=MAX_HEADER_BYTES - SEAL_BYTES)

    def encode(self, message: M) -> bytes:
        data = self._codec.encode(message)
        return xxhash.xxh3_64_digest(data) + data

    def decode(self, frame: bytes) -> M:
        """The message in a frame; WireError says what is wrong with it."""
        seal, data = frame[:SEAL_BYTES], frame[SEAL_BYTES:]
        if seal != xxhash.xxh3_64_digest(data):
            raise WireError(f"a frame of {len(frame)} bytes is damaged")
        return self._codec.decode(data)


TO_PRODUCER: SealedCodec[ToProducer] = SealedCodec(Hold, Open, Ack, Release, Cancel)
TO_CONSUMER: SealedCodec[ToConsumer] = SealedCodec(Opened, Refused, Block, End, Aborted)
