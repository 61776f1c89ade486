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

from baton.kv import KVFingerprint
from baton.request import FirstToken
from baton.wire import Codec

MAX_HEADER_BYTES = 1024 * 1024


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
    checksum: int
    """xxh3_64 of the payload; 0 where checksums are off."""


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

TO_PRODUCER: Codec[ToProducer] = Codec(Hold, Open, Ack, Release, Cancel, max_bytes=MAX_HEADER_BYTES)
TO_CONSUMER: Codec[ToConsumer] = Codec(Opened, Refused, Block, End, Aborted, max_bytes=MAX_HEADER_BYTES)
