"""What a state machine wants done, as values; whoever drives it (a thread, a test, a simulation) does it.

News say by which transport and in what time, for the metrics; that is no part of what they are.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.request import FirstToken
from kv_transfer.protocol.messages import ToConsumer, ToProducer, TransferKey
from kv_transfer.protocol.transports import SENDS_BYTES

Peer = bytes | str
"""How the transport reaches the other end: the identity of who connected to us, or the address we connected to."""


class RankTransfer(NamedTuple):
    """One request's part of a hand-over between two ranks; see geometry.py."""

    request_id: str
    peer_rank: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    peer: Peer
    message: ToProducer | ToConsumer


@dataclass(frozen=True, slots=True)
class SendPieces:
    """Tell the peer of these pieces of our pool."""

    peer: Peer
    key: TransferKey
    version: int
    indices: tuple[int, ...]
    piece_ids: tuple[int, ...]
    has_checksums: bool
    transport: str

    @property
    def has_payload(self) -> bool:
        """The bytes themselves are to be sent."""
        return self.transport in SENDS_BYTES


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Consumer: get ready to read the producer's pool; `Consumer.on_unreachable` if that cannot be done."""

    key: TransferKey
    transport: str
    description: bytes


@dataclass(frozen=True, slots=True)
class Freed:
    """Producer: nobody will read this leg's blocks any more."""

    rank_transfer: RankTransfer
    transport: str = field(default="", compare=False)
    exposed_s: float | None = field(default=None, compare=False)
    """From the end of the prefill to the consumer's Release; None if there was none."""
    is_needed: bool = field(default=True, compare=False)
    """False: the request itself ended before it was handed over, so without a Release nothing has failed."""
    reason: str = field(default="", compare=False)
    """Why there was no Release."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Producer: the consumer is done with a leg that our engine still computes for, or has only begun."""

    rank_transfer: RankTransfer


@dataclass(frozen=True, slots=True)
class Received:
    """Consumer: every piece of the leg is verified."""

    rank_transfer: RankTransfer
    first_token: FirstToken
    num_pieces: int
    transport: str
    elapsed_s: float
    """From asking the producer to the last piece's verification; overlaps the prefill."""
    moving_s: float
    """From the first piece's arrival on."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Consumer: the rest will not come; the first `num_valid_tokens` of the load's tokens are verified."""

    rank_transfer: RankTransfer
    num_valid_tokens: int
    reason: str
    is_cancelled: bool
    transport: str = field(default="", compare=False)
    is_postponed: bool = False
    """The rest may come yet: the leg holds again, and `CanLoad` says when to load it."""


@dataclass(frozen=True, slots=True)
class CanLoad:
    """Consumer: a leg that was put off is complete on the producer, or lost."""

    rank_transfer: RankTransfer


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Consumer: the load was given up and nothing writes its blocks any more."""

    rank_transfer: RankTransfer
    transport: str = field(default="", compare=False)
    has_failed: bool = field(default=False, compare=False)
    """It had failed before the request ended."""


News = Freed | Unwanted | Received | Failed | CanLoad | Quiesced
Effect = Send | SendPieces | OpenPool | News
