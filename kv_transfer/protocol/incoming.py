"""IncomingTransfer: one rank transfer as its consumer sees it, and the consumer's identity; see consumer.py.

    HOLDING ----- load -----> LOADING ----- all verified, End -----> (gone: Received)
       |                         |
       |  Refused, Aborted,      +-- Refused, Aborted, silence, deadline, bad pieces --> DRAINING --> (gone: Failed)
       |  silence                +-- abort ------------------------------------------> DRAINING --> (gone: Quiesced)
       v                         +-- the producer is stuck --------------------------> DRAINING --> HOLDING
     LOST -------- load --------------------------------------------------------------> (gone: Failed)

HOLDING: our scheduler has no room yet, and the producer keeps what it computes. LOADING: blocks are reserved
and may be written. DRAINING: the load was given up, but a read that has begun may still write. Without such a
read, DRAINING ends at once. LOST: no pieces will arrive; the scheduler learns this from its next load.
`abort` also ends HOLDING and LOST.

A stuck producer computes nothing until a consumer loads a complete prompt. A load of an incomplete prompt may
occupy the room for that complete prompt. So this load is postponed: it fails with `is_postponed`, and holds
until `CanLoad` (decision 0011).
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv import KVFingerprint
from kv_transfer.protocol.effects import Failed, Notification, RankTransfer, Received
from kv_transfer.protocol.geometry import PieceShape
from kv_transfer.protocol.messages import ChecksumPolicy, End, Open, Pieces, TransferKey
from kv_transfer.protocol.transports import TransportOffer


@dataclass(frozen=True, slots=True)
class ConsumerIdentity:
    """How this rank identifies itself to a producer, and its timeouts."""

    fingerprint: KVFingerprint
    offer: TransportOffer
    checksums: ChecksumPolicy
    heartbeat_s: float
    peer_timeout_s: float
    load_timeout_s: float


class IncomingState(Enum):
    HOLDING = auto()
    LOADING = auto()
    LOST = auto()
    DRAINING = auto()


MOVES = {
    IncomingState.HOLDING: {IncomingState.LOADING, IncomingState.LOST},
    IncomingState.LOADING: {IncomingState.DRAINING, IncomingState.HOLDING},
    IncomingState.LOST: set[IncomingState](),
    IncomingState.DRAINING: {IncomingState.HOLDING},
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Why there will be no more pieces."""

    reason: str
    is_unneeded: bool = False
    from_producer: bool = False
    """The producer itself ended the rank transfer, and has forgotten it. Then no arrived piece is kept, since the
    producer may have computed the prompt wrongly."""
    is_link_failure: bool = False
    """See TransferRecord."""


def link_failure(reason: str, *, from_producer: bool = False) -> Loss:
    """A Loss that says: these two workers cannot exchange KV, though each may be healthy."""
    return Loss(reason, from_producer=from_producer, is_link_failure=True)


@dataclass(frozen=True, slots=True)
class WantedPieces:
    """Those pieces of a message that are to be written now, as parallel lists, and their transport."""

    message: Pieces
    transport: str
    has_checksums: bool
    """Whether a piece without a matching checksum counts as damaged."""
    positions: list[int]
    """Their positions in the message."""
    indices: list[int]
    piece_ids: list[int]
    """The pieces of our pool to write."""


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    key: TransferKey
    rank_transfer: RankTransfer
    address: str
    num_tokens: int
    shape: PieceShape
    choices: tuple[str, ...]
    """Transports that may still reach the producer's pool."""
    state: IncomingState = IncomingState.HOLDING
    first_piece: int = 0
    num_pieces: int = 0
    """Pieces of the prompt from `first_piece` on, including those that are not needed."""
    targets: dict[int, int] = field(default_factory=dict)
    """Needed pieces: prompt piece index -> piece of our pool to write."""
    verified: dict[int, int] = field(default_factory=dict)
    """Version of each verified piece."""
    arriving: dict[int, int] = field(default_factory=dict)
    """Version of each piece being written now."""
    damaged: dict[int, int] = field(default_factory=dict)
    """Version of each piece that was missing or had a wrong checksum, until it is offered again."""
    num_bad: int = 0
    """Number of damaged pieces that were offered again in the same version."""
    opened: int = 0
    """See Open."""
    producer_host: str | None = None
    """The producer's host id; None until the producer has answered an Open."""
    transport: str | None = None
    is_unproven: bool = False
    """Some pieces arrived without checksums."""
    end: End | None = None
    loss: Loss | None = None
    outcome: Notification | None = None
    """While DRAINING: the outcome to report once nothing is being written."""
    opened_at: float = 0.0
    first_piece_at: float | None = None
    is_postponed: bool = False
    """While HOLDING: the load was postponed, and its room was given back."""
    awaits_can_load: bool = False
    """Our scheduler waits for the `CanLoad` of this postponed load."""
    may_be_postponed: bool = True
    """See LoadBlocks."""

    def move_to(self, state: IncomingState) -> None:
        assert state in MOVES[self.state], f"{self.key}: {self.state.name} -> {state.name}"
        self.state = state

    def reserve(self, first_position: int, block_ids: tuple[int | None, ...], may_be_postponed: bool) -> None:
        """Reserves these blocks for the prompt's tokens from `first_position` on. An id of None: that block is not
        needed."""
        self.is_postponed = self.awaits_can_load = False
        self.may_be_postponed = may_be_postponed
        shape = self.shape
        self.first_piece = first_position // shape.num_tokens * shape.num_groups
        self.num_pieces = shape.num_pieces_for(self.num_tokens) - self.first_piece
        first_entry = self.first_piece // shape.pieces_per_block
        self.targets = dict(shape.pieces_of(first_entry, block_ids, self.num_tokens))

    def ask(self, identity: ConsumerIdentity, transports: tuple[str, ...]) -> Open:
        """An Open that asks for every missing piece."""
        return Open(
            self.key,
            identity.fingerprint,
            num_tokens=self.num_tokens,
            first_piece=self.first_piece,
            received=tuple(self.verified),
            received_versions=tuple(self.verified.values()),
            host=identity.offer.host,
            transports=transports,
            checksums=identity.checksums,
            opened=self.opened,
        )

    def failed(self, loss: Loss, *, is_postponed: bool = False) -> Failed:
        return Failed(
            self.rank_transfer,
            num_valid_tokens=0 if loss.from_producer else self.num_valid_tokens,
            reason=loss.reason,
            is_unneeded=loss.is_unneeded,
            transport=self.transport or "",
            is_postponed=is_postponed,
            is_link_failure=loss.is_link_failure,
        )

    def received(self, now: float) -> Received:
        """The notification that the rank transfer is complete."""
        assert self.end is not None
        first_at = self.first_piece_at if self.first_piece_at is not None else now
        return Received(
            self.rank_transfer,
            self.end.first_token,
            num_pieces=len(self.targets),
            transport=self.transport or "",
            elapsed_s=now - self.opened_at,
            moving_s=now - first_at,
        )

    def hold_again(self) -> None:
        """Returns to HOLDING after a postponed load's writes ended. The next load starts from scratch."""
        self.move_to(IncomingState.HOLDING)
        self.is_postponed = self.awaits_can_load = True
        self.verified.clear()
        self.transport, self.end, self.outcome, self.first_piece_at = None, None, None, None
        self.is_unproven = False

    def claim(self, message: Pieces, has_checksums: bool, now: float) -> WantedPieces:
        """Claims the needed pieces that are neither arriving now nor verified in this version or a later one."""
        assert self.transport is not None
        if self.first_piece_at is None:
            self.first_piece_at = now
        indices, version = message.indices, message.version
        arriving, verified, targets = self.arriving, self.verified, self.targets
        positions = [
            position
            for position, index in enumerate(indices)
            if index in targets and index not in arriving and verified.get(index, -1) < version
        ]
        wanted = [indices[position] for position in positions]
        arriving.update(dict.fromkeys(wanted, version))
        if self.damaged:
            self.num_bad += sum(self.damaged.pop(index, None) == version for index in wanted)
        for index in verified.keys() & wanted:  # an older version is about to be overwritten
            del verified[index]
        self.is_unproven |= bool(wanted) and not has_checksums
        piece_ids = [targets[index] for index in wanted]
        return WantedPieces(message, self.transport, has_checksums, positions, wanted, piece_ids)

    @property
    def is_loading(self) -> bool:
        return self.state is IncomingState.LOADING

    @property
    def is_complete(self) -> bool:
        if self.end is None or len(self.verified) != len(self.targets):
            return False
        # With a smaller version, this is the End of an earlier load.
        return self.end.version >= max(self.verified.values(), default=0)

    @property
    def num_valid_tokens(self) -> int:
        """How many leading tokens of the load have arrived without a gap.

        Without checksums, only the producer's End proves that the bytes were intact when they were read.
        """
        if self.is_unproven:
            return 0
        end_index = self.first_piece + self.num_pieces
        missing = min((index for index in self.targets if index not in self.verified), default=end_index)
        return (missing - self.first_piece) // self.shape.num_groups * self.shape.num_tokens
