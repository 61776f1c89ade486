"""Incoming: one leg as its consumer sees it; see consumer.py."""

from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.protocol.effects import Leg, News
from kv_transfer.protocol.geometry import PieceShape
from kv_transfer.protocol.messages import End, TransferKey


class State(Enum):
    HOLDING = auto()
    LOADING = auto()
    LOST = auto()
    DRAINING = auto()


MOVES = {
    State.HOLDING: {State.LOADING, State.LOST},
    State.LOADING: {State.DRAINING},
    State.LOST: set[State](),
    State.DRAINING: set[State](),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Why there will be no more pieces."""

    reason: str
    is_cancelled: bool = False
    is_producers_word: bool = False
    """The producer said so itself and has forgotten the leg."""


@dataclass(slots=True, eq=False)
class Incoming:
    key: TransferKey
    leg: Leg
    address: str
    num_prompt_tokens: int
    shape: PieceShape
    state: State = State.HOLDING
    first_piece: int = 0
    num_pieces: int = 0
    block_ids: tuple[int, ...] = ()
    """Where the prompt goes from `first_piece` on."""
    verified: dict[int, int] = field(default_factory=dict)
    """Version of each piece that is here."""
    arriving: dict[int, int] = field(default_factory=dict)
    """Version of each piece that is being written at this moment."""
    num_bad: int = 0
    producer_host: str | None = None
    """Known once it answered an Open."""
    transport: str | None = None
    is_unproven: bool = False
    """Some pieces were read without checksums, in whatever way the others came."""
    end: End | None = None
    loss: Loss | None = None
    outcome: News | None = None
    """While DRAINING: what to say when nothing is being written any more."""
    opened_at: float = 0.0
    first_piece_at: float | None = None

    def move_to(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.key}: {self.state.name} -> {state.name}"
        self.state = state

    def reserve(self, first_token: int, block_ids: tuple[int, ...]) -> None:
        """These blocks are for the prompt's tokens from `first_token` on."""
        self.first_piece = first_token // self.shape.num_tokens
        self.num_pieces = self.shape.num_pieces_for(self.num_prompt_tokens) - self.first_piece
        self.block_ids = block_ids

    def piece_id(self, index: int) -> int:
        """Where in our pool piece `index` of the prompt belongs."""
        block, part = divmod(index - self.first_piece, self.shape.pieces_per_block)
        return self.shape.pieces_of(self.block_ids[block])[part]

    def wants(self, index: int, version: int) -> bool:
        """Neither here, nor on its way in, nor beyond what was asked for."""
        is_ours = 0 <= index - self.first_piece < self.num_pieces
        return is_ours and index not in self.arriving and self.verified.get(index, -1) < version

    @property
    def is_complete(self) -> bool:
        return self.end is not None and len(self.verified) == self.num_pieces

    @property
    def num_valid_tokens(self) -> int:
        """Of the load's tokens, how many are here without a gap."""
        index = self.first_piece
        while index in self.verified:
            index += 1
        return (index - self.first_piece) * self.shape.num_tokens
