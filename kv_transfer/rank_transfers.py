"""RankTransfers: splits a request's hand-over into one transfer for each peer rank that has, or needs, our heads."""

from dataclasses import dataclass

from baton.kv import KVTransferParams, TransferRole
from kv_transfer.pool import KVPool, PieceView
from kv_transfer.protocol.effects import RankTransfer
from kv_transfer.protocol.geometry import RankLayout, peers_of
from kv_transfer.protocol.messages import TransferKey


@dataclass(frozen=True, slots=True)
class RankTransferEnd:
    """This rank's end of one rank transfer."""

    rank_transfer: RankTransfer
    key: TransferKey
    peer: str
    """The peer's name."""
    address: str
    """Where the peer's rank listens."""
    view: PieceView


class RankTransfers:
    """The rank transfers of all requests on one side of their hand-overs."""

    def __init__(self, incarnation: str, pool: KVPool) -> None:
        self._incarnation = incarnation
        self._pool = pool
        self._views: dict[RankLayout, PieceView] = {}
        """By the peer's layout; there are as few as there are kinds of workers."""
        self._by_request: dict[str, tuple[RankTransferEnd, ...]] = {}
        self._refusals: dict[str, str] = {}
        self._by_key: dict[TransferKey, RankTransferEnd] = {}

    def open(self, request_id: str, transfer: KVTransferParams) -> tuple[RankTransferEnd, ...]:
        """The rank transfers of a new request; `close` must follow. Empty if the workers cannot exchange KV; see
        `refusal`.
        """
        ours, peer = self._pool.layout, transfer.peer
        num_peers = len(peer.kv_addresses)
        ends: list[RankTransferEnd] = []
        if reason := self._pool.mismatch(RankLayout(peer.block_size, num_peers)):
            self._refusals[request_id] = reason
            num_peers = 0
        for rank in peers_of(ours.rank, ours.num_ranks, num_peers) if num_peers else ():
            key = self._key(transfer, rank)
            view = self._view(RankLayout(peer.block_size, num_peers, rank))
            end = RankTransferEnd(
                RankTransfer(request_id, rank), key, peer.name, peer.kv_addresses[rank], view
            )
            self._by_key.setdefault(key, end)
            ends.append(end)
        self._by_request[request_id] = tuple(ends)
        return tuple(ends)

    def of(self, request_id: str) -> tuple[RankTransferEnd, ...]:
        """Empty for a request that is unknown, or has ended."""
        return self._by_request.get(request_id, ())

    def refusal(self, request_id: str) -> str | None:
        """Why this request has no rank transfers."""
        return self._refusals.get(request_id)

    def at(self, key: TransferKey) -> RankTransferEnd:
        """A rank transfer of an open request."""
        return self._by_key[key]

    def find(self, rank_transfer: RankTransfer) -> RankTransferEnd | None:
        """None if the request has ended."""
        ends = self.of(rank_transfer.request_id)
        return next((end for end in ends if end.rank_transfer == rank_transfer), None)

    def peer_of(self, rank_transfer: RankTransfer) -> str:
        """The peer's name; empty if the request has ended."""
        end = self.find(rank_transfer)
        return end.peer if end is not None else ""

    def close(self, request_id: str) -> None:
        """Ends the request's hand-over. A second claim to the same key has nothing of its own to remove."""
        self._refusals.pop(request_id, None)
        for end in self._by_request.pop(request_id, ()):
            if self._by_key.get(end.key) is end:
                del self._by_key[end.key]

    def __len__(self) -> int:
        return len(self._by_request)

    def _view(self, theirs: RankLayout) -> PieceView:
        if theirs not in self._views:
            self._views[theirs] = self._pool.pieces(theirs)
        return self._views[theirs]

    def _key(self, transfer: KVTransferParams, peer_rank: int) -> TransferKey:
        ours, theirs = (self._incarnation, self._pool.layout.rank), (transfer.peer.incarnation, peer_rank)
        is_producer = transfer.role is TransferRole.PRODUCER
        producer, consumer = (ours, theirs) if is_producer else (theirs, ours)
        return TransferKey(
            transfer.transfer_id, transfer.attempt, producer[0], consumer[0], producer[1], consumer[1]
        )
