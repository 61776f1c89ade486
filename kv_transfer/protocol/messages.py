"""The messages between producer and consumer of a hand-over, as typed values; knows no socket.

    consumer (decode)                      producer (prefill)
      Hold      ---------------------------->   the request waits for room; keep what you compute
                <----------------------------   Opened (no transport, progress)
      Open      ---------------------------->   there is room: send pieces from `first_piece` on
                <----------------------------   Opened (transport, pool, progress), or Refused
                <----------------------------   Pieces, as they are computed: their bytes, or where to read them
      Ack       ---------------------------->   these pieces are verified (and those must be sent again)
                <----------------------------   End: that was all, and this is the next token
      Release   ---------------------------->   everything is verified; free your blocks
      Cancel    ---------------------------->   from any state; free your blocks
                <----------------------------   Aborted: from any state; no more pieces will come
                <----------------------------   Unreadable: your last message was damaged, or has another format

While nothing else is sent, the consumer repeats Hold and Open. They are the heartbeats that extend the lease,
and their answers show that the producer is alive. An Open that lists the arrived pieces repairs every loss of
a message. On a slow link, pieces are under way for many heartbeats. So an Open also says which Opened came
last, and the producer repeats only what it had sent before this Opened.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import xxhash

from baton.errors import WireError
from baton.kv import PROTOCOL_VERSION, KVFingerprint, check_names
from baton.messages.wire import Codec
from baton.request import FirstToken

MAX_HEADER_BYTES = 1024 * 1024
SEAL_BYTES = 8
VERSION_BYTES = 2
PREFIX_BYTES = SEAL_BYTES + VERSION_BYTES
MAX_PIECES_PER_MESSAGE = 1024
MAX_TRANSPORTS = 16
MAX_PIECES, MAX_VERSION = 2**17, 2**16 - 1
"""The most pieces of a prompt in one rank transfer, and the highest `Pieces.version`. With these limits, an Open that
lists all pieces fits into MAX_HEADER_BYTES."""
MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class TransferKey:
    """The one identity of a rank transfer. A restarted process is another incarnation, so no old message matches it."""

    transfer_id: str
    attempt: int
    producer: str
    consumer: str
    producer_rank: int = 0
    consumer_rank: int = 0

    def __post_init__(self) -> None:
        check_names(self.transfer_id, self.producer, self.consumer)


class ChecksumPolicy(Enum):
    """When a consumer wants every piece's checksum computed and compared."""

    AUTO = "auto"
    """Only if the two workers are on different hosts."""
    ON = "on"
    OFF = "off"

    def applies(self, producer_host: str, consumer_host: str) -> bool:
        """Whether checksums are required. Both ends get the same result. Without a required checksum, a piece counts as
        damaged."""
        return self is ChecksumPolicy.ON or (self is ChecksumPolicy.AUTO and producer_host != consumer_host)


@dataclass(frozen=True, slots=True)
class Hold:
    key: TransferKey
    is_postponed: bool = False
    """The consumer had room, but gave it back: no piece may be offered before the next Open."""


@dataclass(frozen=True, slots=True)
class Open:
    key: TransferKey
    fingerprint: KVFingerprint
    num_tokens: int
    first_piece: int
    """Pieces before this one are in the consumer's prefix cache."""
    received: tuple[int, ...]
    """Pieces that have arrived; the consumer still needs all others."""
    received_versions: tuple[int, ...]
    """The version of each piece in `received`."""
    host: str
    transports: tuple[str, ...]
    """Transports that the consumer can use, the best first."""
    checksums: ChecksumPolicy
    opened: int = 0
    """The highest number of an `Opened` that has arrived. Pieces sent before this `Opened` have arrived, too, or are
    lost. Later pieces may still be under way."""

    def __post_init__(self) -> None:
        if len(self.received) != len(self.received_versions):
            raise WireError(f"{len(self.received)} pieces but {len(self.received_versions)} versions")
        if len(self.transports) > MAX_TRANSPORTS:
            raise WireError(f"{len(self.transports)} transports")
        named = self.fingerprint
        check_names(self.host, named.model, named.dtype, named.layout, *self.transports)


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to Open, and to Hold. An answer to Hold has no transport."""

    key: TransferKey
    host: str
    transport: str | None
    pool: bytes
    """How the consumer can read the producer's pool; empty if bytes are sent."""
    is_complete: bool = False
    """The whole prompt is computed."""
    is_stuck: bool = False
    """The producer computes nothing until a complete prompt is loaded. The room reserved for this incomplete prompt may
    prevent such a load."""
    number: int = 0
    """Counts the messages of this type in a rank transfer, from 1 on."""


@dataclass(frozen=True, slots=True)
class Refused:
    """These two workers cannot exchange KV."""

    key: TransferKey
    reason: str
    """Cut to MAX_REASON_CHARS, like every reason."""

    def __post_init__(self) -> None:
        _cut_reason(self)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some of the prompt's pieces are ready. If bytes are sent, they follow this header, in frames of whole pieces."""

    key: TransferKey
    version: int
    """How often, before this message, a preemption took the producer's blocks, or the consumer gave its room back."""
    indices: tuple[int, ...]
    """Positions in the prompt's sequence of pieces."""
    piece_ids: tuple[int, ...]
    """The pieces' ids in the producer's pool."""
    checksums: tuple[int, ...]
    """xxh3_64 of each piece; empty if no checksums are required."""

    def __post_init__(self) -> None:
        num_pieces = len(self.indices)
        if len(self.piece_ids) != num_pieces or len(self.checksums) not in (0, num_pieces):
            raise WireError(
                f"{num_pieces} pieces, {len(self.piece_ids)} places, {len(self.checksums)} checksums"
            )
        if num_pieces > MAX_PIECES_PER_MESSAGE or len(set(self.indices)) != num_pieces:
            raise WireError(f"expected at most {MAX_PIECES_PER_MESSAGE} different pieces, got {num_pieces}")


@dataclass(frozen=True, slots=True)
class Ack:
    key: TransferKey
    version: int
    valid: tuple[int, ...]
    damaged: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    key: TransferKey
    version: int
    """See Pieces. An End proves nothing about pieces of a later version."""
    num_pieces: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class Release:
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Cancel:
    key: TransferKey
    reason: str
    is_unneeded: bool = False
    """The request itself ended; otherwise only its load failed."""

    def __post_init__(self) -> None:
        _cut_reason(self)


@dataclass(frozen=True, slots=True)
class Aborted:
    key: TransferKey
    reason: str
    is_unneeded: bool
    """Whether the request itself ended. Otherwise only the hand-over failed, and the consumer may continue alone."""

    def __post_init__(self) -> None:
        _cut_reason(self)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Tells a consumer that its message could not be read.

    Only producers send it. Otherwise, two peers that cannot read each other would answer each other for ever.
    """

    reason: str
    is_damaged: bool
    """The message was damaged on the way, and will be repeated; otherwise the protocols are incompatible for good."""

    def __post_init__(self) -> None:
        _cut_reason(self)


def _cut_reason(message: Refused | Cancel | Aborted | Unreadable) -> None:
    """Cuts the reason to its limit. A reason may quote the peer's reason, which may quote ours, and so on."""
    object.__setattr__(message, "reason", message.reason[:MAX_REASON_CHARS])


ToProducer = Hold | Open | Ack | Release | Cancel
ToConsumer = Opened | Refused | Pieces | End | Aborted | Unreadable

M = TypeVar("M")


class DamagedFrame(WireError):
    """The bytes are not those that were sent."""


class OtherVersion(WireError):
    """The bytes are intact, but of another version of this protocol."""


class SealedCodec(Generic[M]):
    """A Codec whose frames begin with a seal, the xxh3_64 of all the rest, and with the protocol's version.

    The seal detects even one flipped bit in a token id. The version is outside the message, since other
    versions may have any format.
    """

    def __init__(self, *kinds: type[M]) -> None:
        self._codec: Codec[M] = Codec(*kinds, max_bytes=MAX_HEADER_BYTES - PREFIX_BYTES)

    def encode(self, message: M) -> bytes:
        return seal(self._codec.encode(message), PROTOCOL_VERSION)

    def decode(self, frame: bytes) -> M:
        """The message in a frame. Raises DamagedFrame, OtherVersion, or a WireError that says what is wrong with it."""
        if len(frame) < PREFIX_BYTES or frame[:SEAL_BYTES] != xxhash.xxh3_64_digest(frame[SEAL_BYTES:]):
            raise DamagedFrame(f"a frame of {len(frame)} bytes is damaged")
        version = int.from_bytes(frame[SEAL_BYTES:PREFIX_BYTES])
        if version != PROTOCOL_VERSION:
            raise OtherVersion(
                f"version {version} of the KV plane, ours is {PROTOCOL_VERSION}; run the same version of Baton on both"
            )
        return self._codec.decode(frame[PREFIX_BYTES:])


def seal(data: bytes, version: int) -> bytes:
    """A frame of this version, for SealedCodec to read."""
    body = version.to_bytes(VERSION_BYTES) + data
    return xxhash.xxh3_64_digest(body) + body


TO_PRODUCER: SealedCodec[ToProducer] = SealedCodec(Hold, Open, Ack, Release, Cancel)
TO_CONSUMER: SealedCodec[ToConsumer] = SealedCodec(Opened, Refused, Pieces, End, Aborted, Unreadable)
