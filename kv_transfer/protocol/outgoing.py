"""OutgoingTransfer: one rank transfer as its producer sees it, and the window of bytes that each peer may have.

    EARLY ----- begin -----> PREPARING ----- Open -----> STREAMING ----- Release, lease over -----> (gone, blocks freed)
      |                          |                           |
      +--------------------------+----- Cancel, refused -----+--> CANCELLED -- finish, abort --> (gone, blocks freed)

    STREAMING -- the consumer gave its room back --> PREPARING

EARLY: the consumer's message arrived before our engine's command. PREPARING: pieces become ready; none is
offered yet. STREAMING: pieces are offered as they become ready. Each peer has a window of unacknowledged
bytes; its rank transfers send into this window in turns. CANCELLED: the consumer needs no more pieces, and
our own engine is notified.

Our engine may be starved while every complete prompt waits for room on its consumer. Then only a consumer can
free blocks here. So consumers that reserve room for incomplete prompts get a message that this producer is
stuck, and give the room back (decision 0011).
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv import KVFingerprint
from baton.request import FirstToken
from kv_transfer.protocol.effects import Peer, RankTransfer
from kv_transfer.protocol.geometry import PieceShape, RankLayout, mismatch
from kv_transfer.protocol.messages import MAX_PIECES_PER_MESSAGE, Aborted, Open, Opened, Refused, TransferKey
from kv_transfer.protocol.transports import CUDA_IPC, SENDS_BYTES, TransportOffer

BYTES_PER_TURN = 4 * 1024 * 1024
"""The most bytes that a rank transfer sends in one turn."""

BYTES_PER_TURN_READ = 32 * 1024 * 1024
"""The same limit if the consumer reads the pool. An offer costs the same for any number of bytes, and reading this many
takes 3 ms."""

BYTES_PER_TURN_BY_DEVICE = 256 * 1024 * 1024
"""The same limit if the consumer's device reads the pool. Reading this many bytes takes some 0.2 ms. A peer may have
two such offers at once, so that it never waits for the next one."""


Farewell = Aborted | Refused | None
"""What a consumer learns about a rank transfer that has ended. None: the consumer ended it, and needs no answer."""


class OutgoingState(Enum):
    EARLY = auto()
    PREPARING = auto()
    STREAMING = auto()
    CANCELLED = auto()


MOVES = {
    OutgoingState.EARLY: {OutgoingState.PREPARING, OutgoingState.CANCELLED},
    OutgoingState.PREPARING: {OutgoingState.STREAMING, OutgoingState.CANCELLED},
    OutgoingState.STREAMING: {OutgoingState.PREPARING, OutgoingState.CANCELLED},
    OutgoingState.CANCELLED: set[OutgoingState](),
}


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """How this rank identifies itself to a consumer."""

    incarnation: str
    fingerprint: KVFingerprint
    layout: RankLayout
    offer: TransportOffer

    def choose(self, message: Open, num_tokens: int) -> tuple[str | None, str]:
        """The transport for a prompt of `num_tokens`; or None and why this consumer cannot get the prompt."""
        ours, theirs = self.fingerprint, message.fingerprint
        if differences := ours.differences(theirs):
            return None, "the workers do not match: " + "; ".join(differences)
        their_layout = RankLayout(theirs.block_size, theirs.num_ranks, message.key.consumer_rank)
        if reason := mismatch(ours.num_divided_heads, self.layout, their_layout):
            return None, f"the workers do not match: {reason}"
        if message.num_tokens != num_tokens:
            return None, f"the prompts differ: {num_tokens} != {message.num_tokens} tokens"
        if transport := self.offer.choose(message.host, message.transports):
            return transport, ""
        here, there = ", ".join(self.offer.transports), ", ".join(message.transports) or "none"
        return None, f"no common transport: the prefill worker has {here}, the decode worker has {there}"


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One rank transfer as its producer sees it."""

    key: TransferKey
    state: OutgoingState
    rank_transfer: RankTransfer | None = None
    """None until our own engine knows of it."""
    shape: PieceShape | None = None
    piece_nbytes: int = 0
    num_tokens: int = 0
    peer: Peer = b""
    open: Open | None = None
    """The latest Open; it may arrive before our engine knows of the request."""
    transport: str = ""
    version: int = 0
    ready: dict[int, int] = field(default_factory=dict)
    """Prompt piece index -> piece of our pool, for computed pieces."""
    unsent: deque[int] = field(default_factory=deque)
    unacked: dict[int, int] = field(default_factory=dict)
    """Offered piece -> `num_opened` at that time."""
    acked: set[int] = field(default_factory=set)
    num_opened: int = 0
    """See Opened.number."""
    first_token: FirstToken | None = None
    """Set when the prefill is complete; the lease starts then."""
    finished_at: float = 0.0
    exposed_s: float | None = None
    """Time from the end of the prefill to the consumer's Release; None without a Release."""
    is_needed: bool = True
    """False once either engine says that the request itself has ended."""
    end_reason: str = ""
    """Why the transfer ended without a Release; later reasons are ignored."""
    is_end_sent: bool = False
    is_postponed: bool = False
    """The consumer gave its room back, and waits until the prompt is complete."""
    early_until: float = 0.0
    """When EARLY ends, even if the consumer is alive; standstills of this process do not count."""

    def move_to(self, state: OutgoingState) -> None:
        assert state in MOVES[self.state], f"{self.key}: {self.state.name} -> {state.name}"
        self.state = state

    def note_earlier_end(self, farewell: Farewell) -> None:
        """Notes that the rank transfer had ended before our engine began it."""
        self.move_to(OutgoingState.CANCELLED)
        if farewell is None:
            self.is_needed, self.end_reason = False, "the decode worker had ended the hand-over before"
        else:
            self.is_needed = isinstance(farewell, Refused) or not farewell.is_unneeded
            self.end_reason = farewell.reason

    @property
    def is_cancelled(self) -> bool:
        return self.state is OutgoingState.CANCELLED

    @property
    def is_awaited(self) -> bool:
        """Whether the consumer keeps room for this prompt, which is incomplete."""
        return (
            self.open is not None and self.first_token is None and self.state is not OutgoingState.CANCELLED
        )

    @property
    def num_pieces(self) -> int:
        assert self.shape is not None
        return self.shape.num_pieces_for(self.num_tokens)

    def answer(self, offer: TransportOffer, *, is_stuck: bool) -> Opened:
        """The answer to a Hold or an Open."""
        self.num_opened += 1
        return Opened(
            self.key,
            offer.host,
            self.transport or None,
            offer.pools.get(self.transport, b""),
            is_complete=self.first_token is not None,
            is_stuck=is_stuck,
            number=self.num_opened,
        )

    def blocks_ready(self, first_block: int, block_ids: Iterable[int | None]) -> None:
        """These blocks of the prompt are computed. An id of None: no consumer needs that block."""
        assert self.shape is not None
        for index, piece_id in self.shape.pieces_of(first_block, block_ids, self.num_tokens):
            self.ready[index] = piece_id
            self._offer(index)

    def no_longer_under_way(self, message: Open, peer: Peer, transport: str) -> list[int]:
        """The unacknowledged pieces that have arrived or are lost, now that this Open has come."""
        if (peer, transport) != (self.peer, self.transport):
            return list(self.unacked)  # the connection over which they were sent has ended
        arrived = set(message.received)
        return [
            index for index, opened in self.unacked.items() if opened < message.opened or index in arrived
        ]

    def reopen(self, message: Open, peer: Peer, transport: str) -> None:
        """Handles an Open. Of the pieces that it lists as arrived, accepts those that can be valid. Offers all other
        ready pieces again, unless they may be under way."""
        self.peer, self.open, self.transport = peer, message, transport
        claims = zip(message.received, message.received_versions, strict=True)
        self.acked = {index for index, version in claims if version == self.version or index in self.acked}
        self.is_end_sent = self.is_postponed = False
        self.unsent.clear()
        for index in sorted(self.ready):
            self._offer(index)

    def arrived(self, indices: Iterable[int]) -> None:
        """The consumer has these pieces; they are not offered again."""
        self.acked.update(indices)
        if not self.acked.isdisjoint(self.unsent):
            self.unsent = deque(index for index in self.unsent if index not in self.acked)

    def postpone(self) -> None:
        """The consumer gave its room back, and with it all received pieces. Acknowledgements that still arrive for them
        do not count."""
        if self.state is OutgoingState.STREAMING:
            self.move_to(OutgoingState.PREPARING)
            self.version += 1
        self.open, self.transport = None, ""
        self.acked.clear()
        self.is_end_sent, self.is_postponed = False, True

    def withdraw(self) -> None:
        """Withdraws all blocks, which belong to other requests from now on.

        Pieces that were read from these blocks count as arrived only if they were already acknowledged.
        """
        self.ready.clear()
        self.unsent.clear()
        self.version += 1

    def _offer(self, index: int) -> None:
        """Queues a ready piece unless the consumer has it, or it may be under way."""
        first = self.open.first_piece if self.open is not None else 0
        if index >= first and index not in self.acked and index not in self.unacked:
            self.unsent.append(index)


def bytes_per_turn(transport: str) -> int:
    if transport == CUDA_IPC:
        return BYTES_PER_TURN_BY_DEVICE
    return BYTES_PER_TURN if transport in SENDS_BYTES else BYTES_PER_TURN_READ


class SendWindow:
    """Bounds the unacknowledged bytes of each peer, and decides whose turn it is to send."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._inflight: Counter[Peer] = Counter()
        """By peer: bytes offered but not acknowledged."""
        self._turns: deque[OutgoingTransfer] = deque()
        """Rank transfers with pieces to offer; the pieces may be withdrawn before their turn."""

    def join(self, transfer: OutgoingTransfer) -> None:
        """Queues a rank transfer last, if it is not queued yet."""
        if transfer not in self._turns:
            self._turns.append(transfer)

    def next_turns(self) -> Iterator[tuple[OutgoingTransfer, tuple[int, ...]]]:
        """Yields each rank transfer in turn, with its next pieces, until all are offered or the windows are full."""
        stalled: list[OutgoingTransfer] = []
        while self._turns:
            transfer = self._turns.popleft()
            if num_pieces := self._num_pieces_that_fit(transfer):
                indices = tuple([transfer.unsent.popleft() for _ in range(num_pieces)])
                transfer.unacked.update(dict.fromkeys(indices, transfer.num_opened))
                self._inflight[transfer.peer] += num_pieces * transfer.piece_nbytes
                self._turns.append(transfer)
                yield transfer, indices
            elif transfer.unsent:
                stalled.append(transfer)
        self._turns.extend(stalled)

    def reopen(self, transfer: OutgoingTransfer, message: Open, peer: Peer, transport: str) -> None:
        """Handles an Open of this rank transfer; see OutgoingTransfer.reopen."""
        for index in transfer.no_longer_under_way(message, peer, transport):
            self.acknowledged(transfer, index)
        transfer.reopen(message, peer, transport)

    def acknowledged(self, transfer: OutgoingTransfer, index: int) -> bool:
        """Removes the piece from the unacknowledged pieces; False if it is not one of them."""
        if index not in transfer.unacked:
            return False
        del transfer.unacked[index]
        self._forget_bytes(transfer, 1)
        return True

    def forget_inflight(self, transfer: OutgoingTransfer) -> None:
        """Removes all pieces of this rank transfer from the unacknowledged bytes."""
        self._forget_bytes(transfer, len(transfer.unacked))
        transfer.unacked.clear()

    def leave(self, transfer: OutgoingTransfer) -> None:
        """Ends the turns of this rank transfer, and forgets its unacknowledged bytes."""
        if transfer in self._turns:
            self._turns.remove(transfer)
        self.forget_inflight(transfer)

    def check_integrity(self, transfers: Iterable[OutgoingTransfer]) -> None:
        """Asserts that the unacknowledged bytes are those of these rank transfers."""
        inflight: Counter[Peer] = Counter()
        for transfer in transfers:
            inflight[transfer.peer] += len(transfer.unacked) * transfer.piece_nbytes
        assert dict(+inflight) == dict(self._inflight), f"{self._inflight} instead of {inflight}"

    def _forget_bytes(self, transfer: OutgoingTransfer, num_pieces: int) -> None:
        self._inflight[transfer.peer] -= num_pieces * transfer.piece_nbytes
        if self._inflight[transfer.peer] <= 0:
            del self._inflight[transfer.peer]

    def _num_pieces_that_fit(self, transfer: OutgoingTransfer) -> int:
        """The number of pieces to send now: at least one, if there is one and the peer has no unacknowledged bytes."""
        inflight, size = self._inflight[transfer.peer], transfer.piece_nbytes
        turn = bytes_per_turn(transfer.transport)
        max_bytes = max(self._max_bytes, 2 * turn) if transfer.transport == CUDA_IPC else self._max_bytes
        num_in_window = (max_bytes - inflight) // size
        if inflight == 0:
            num_in_window = max(1, num_in_window)
        return max(0, min(num_in_window, max(1, turn // size), MAX_PIECES_PER_MESSAGE, len(transfer.unsent)))
