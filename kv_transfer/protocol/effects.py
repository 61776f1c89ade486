"""Effects of a state machine, as values; its driver (a thread, a test, a simulator) carries them out.

Some fields of notifications are only for metrics. Comparisons ignore these fields (`compare=False`).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.request import FirstToken
from kv_transfer.protocol.messages import ToConsumer, ToProducer, TransferKey
from kv_transfer.protocol.transports import SENDS_BYTES

Peer = bytes | str
"""The transport's name for the other end: the identity of a peer that connected, or the address we connected to."""


class RankTransfer(NamedTuple):
    """The part of a request's hand-over between this rank and one rank of the peer; see geometry.py."""

    request_id: str
    peer_rank: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    peer: Peer
    message: ToProducer | ToConsumer


@dataclass(frozen=True, slots=True)
class SendPieces:
    """Announce these pieces of our pool to the peer."""

    peer: Peer
    key: TransferKey
    version: int
    indices: tuple[int, ...]
    piece_ids: tuple[int, ...]
    has_checksums: bool
    transport: str

    @property
    def has_payload(self) -> bool:
        """Whether to send the bytes themselves."""
        return self.transport in SENDS_BYTES


@dataclass(frozen=True, slots=True)
class OpenPool:
    """Consumer: open the producer's pool; on failure call `Consumer.on_unreachable`."""

    key: TransferKey
    transport: str
    description: bytes


@dataclass(frozen=True, slots=True)
class Freed:
    """Producer: this rank transfer's blocks will not be read any more."""

    rank_transfer: RankTransfer
    transport: str = field(default="", compare=False)
    exposed_s: float | None = field(default=None, compare=False)
    """Time from the end of the prefill to the consumer's Release; None without a Release."""
    is_needed: bool = field(default=True, compare=False)
    """False if the request itself ended before the hand-over: then a missing Release is no failure."""
    reason: str = field(default="", compare=False)
    """Why there was no Release."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Producer: the consumer has given up a rank transfer whose prompt our engine has yet to compute or complete."""

    rank_transfer: RankTransfer


@dataclass(frozen=True, slots=True)
class Received:
    """Consumer: every piece of the rank transfer is verified, and the producer's `End` has arrived."""

    rank_transfer: RankTransfer
    first_token: FirstToken
    num_pieces: int
    transport: str
    elapsed_s: float
    """Time from asking the producer to this moment; overlaps the prefill."""
    moving_s: float
    """Time from the arrival of the first piece to this moment."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Consumer: the load ended before every piece arrived. Its first `num_valid_tokens` tokens are verified."""

    rank_transfer: RankTransfer
    num_valid_tokens: int
    reason: str
    is_unneeded: bool
    transport: str = field(default="", compare=False)
    is_postponed: bool = False
    """The rest may arrive in a later load: the rank transfer is HOLDING again, and `CanLoad` says when to load it."""
    is_link_failure: bool = field(default=False, compare=False)
    """See TransferRecord."""


@dataclass(frozen=True, slots=True)
class CanLoad:
    """Consumer: a postponed rank transfer is complete on the producer, or lost."""

    rank_transfer: RankTransfer


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Consumer: the load was given up, and its blocks are not written any more."""

    rank_transfer: RankTransfer
    transport: str = field(default="", compare=False)
    has_failed: bool = field(default=False, compare=False)
    """Whether the load failed before the request ended."""


Notification = Freed | Unwanted | Received | Failed | CanLoad | Quiesced
Effect = Send | SendPieces | OpenPool | Notification
