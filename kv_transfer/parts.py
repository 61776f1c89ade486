"""Parts of a request's hand-over: its rank transfers, and the outcome that their outcomes combine to.

The parts of one rank's hand-over are its rank transfers: one for each rank of the peer that has, or needs, some of this
rank's heads. The parts of a worker's hand-over are its ranks. If all heads share a latent, a rank of a producer may
have no rank transfer.

A load has arrived when all its parts have arrived. It fails when one part fails. Then the other parts are
given up, and the load ends when the last part reports its end. Of a failed load, only the blocks that every
part has are kept. Blocks become free when no part uses them any more. If one part is postponed, the other parts
are postponed, too. But if another part has arrived by then, the prompt is complete, and the postponed parts are
loaded again at once.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from baton.kv import KVTransferParams, TransferRole
from baton.step import FailedKV, ReceivedKV
from kv_transfer.commands import GiveUpLoad, LoadBlocks
from kv_transfer.pool import PieceView, RankPool
from kv_transfer.protocol.effects import RankTransfer
from kv_transfer.protocol.geometry import RankLayout
from kv_transfer.protocol.messages import TransferKey

P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RankTransferSide:
    """One rank transfer, as this rank sees it."""

    rank_transfer: RankTransfer
    key: TransferKey
    peer: str
    """The peer's name."""
    address: str
    """Address at which the peer's rank listens."""
    view: PieceView


class RankTransfers:
    """The rank transfers of all requests on one side of their hand-overs."""

    def __init__(self, incarnation: str, pool: RankPool) -> None:
        self._incarnation = incarnation
        self._pool = pool
        self._views: dict[RankLayout, PieceView] = {}
        """Views by the peer's layout. There are only as many layouts as kinds of workers."""
        self._by_request: dict[str, tuple[RankTransferSide, ...]] = {}
        self._refusals: dict[str, str] = {}
        self._by_key: dict[TransferKey, RankTransferSide] = {}

    def open(self, request_id: str, transfer: KVTransferParams) -> tuple[RankTransferSide, ...]:
        """The rank transfers of a new request; `close` must follow.

        Empty if the workers cannot exchange KV (see `refusal`), or if other ranks of this producer send all of the KV.
        """
        peer, num_peers = transfer.peer, len(transfer.peer.kv_addresses)
        if reason := self._pool.mismatch(RankLayout(peer.block_size, num_peers)):
            self._refusals[request_id] = reason
            ranks = range(0)
        else:
            is_producer = transfer.role is TransferRole.PRODUCER
            ranks = self._pool.peers_of(num_peers, is_producer=is_producer)
        sides: list[RankTransferSide] = []
        for rank in ranks:
            key = self._key(transfer, rank)
            view = self._view(RankLayout(peer.block_size, num_peers, rank))
            side = RankTransferSide(
                RankTransfer(request_id, rank), key, peer.name, peer.kv_addresses[rank], view
            )
            self._by_key.setdefault(key, side)
            sides.append(side)
        self._by_request[request_id] = tuple(sides)
        return tuple(sides)

    def of(self, request_id: str) -> tuple[RankTransferSide, ...]:
        """The request's rank transfers; empty if the request is unknown or has ended."""
        return self._by_request.get(request_id, ())

    def refusal(self, request_id: str) -> str | None:
        """Why this request has no rank transfers; None if the workers can exchange KV."""
        return self._refusals.get(request_id)

    def has_none(self, request_id: str) -> bool:
        """Whether a request is open without rank transfers."""
        return self._by_request.get(request_id) == ()

    def at(self, key: TransferKey) -> RankTransferSide:
        """A rank transfer of an open request."""
        return self._by_key[key]

    def find(self, rank_transfer: RankTransfer) -> RankTransferSide | None:
        """The rank transfer, as this rank sees it; None if its request has ended."""
        sides = self.of(rank_transfer.request_id)
        return next((side for side in sides if side.rank_transfer == rank_transfer), None)

    def peer_of(self, rank_transfer: RankTransfer) -> str:
        """The peer's name; empty if the request has ended."""
        side = self.find(rank_transfer)
        return side.peer if side is not None else ""

    def close(self, request_id: str) -> None:
        """Ends the request's hand-over. If another request used the same key first, that request keeps the key."""
        self._refusals.pop(request_id, None)
        for side in self._by_request.pop(request_id, ()):
            if self._by_key.get(side.key) is side:
                del self._by_key[side.key]

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


@dataclass(slots=True)
class _Load(Generic[P]):
    command: LoadBlocks
    open: set[P]
    postponed: set[P] = field(default_factory=set)
    received: ReceivedKV | None = None
    """The sum of the parts that have arrived."""
    failed: FailedKV | None = None
    """What the failed parts have in common: the blocks that are valid in all of them, and the first reason."""
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class LoadQuiesced:
    """This worker gave the load up, and the load has ended."""


@dataclass(frozen=True, slots=True)
class GiveUp(Generic[P]):
    """One part failed or was postponed: end `parts`, too. Each of them reports `failed`, unless it has arrived."""

    command: GiveUpLoad
    parts: tuple[P, ...]


@dataclass(frozen=True, slots=True)
class LoadAgain(Generic[P]):
    """All other parts have arrived: load the postponed `parts` again, into the same blocks."""

    command: LoadBlocks
    parts: tuple[P, ...]


LoadOutcome = ReceivedKV | FailedKV | LoadQuiesced | GiveUp[P] | LoadAgain[P] | None
"""What the report of a part means for the whole load. None: nothing yet, or the report is ignored. FailedKV with
`is_postponed`: all parts wait for another load. FailedKV without it: the caller must abort the postponed parts."""


class Loads(Generic[P]):
    """Current loads by request, with what their parts have reported. P names a part."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load[P]] = {}

    def begin(self, command: LoadBlocks, parts: Iterable[P]) -> None:
        self._loads[command.request_id] = _Load(command, set(parts))

    def abort(self, request_id: str) -> None:
        """Call it if the request ended on this worker. The caller also aborts every open part."""
        if request_id in self._loads:
            self._loads[request_id].is_aborted = True

    def arrived(self, part: P, received: ReceivedKV) -> LoadOutcome[P]:
        load = self._close(received.request_id, part)
        if load is None:
            return None
        load.received = received if load.received is None else _sum(load.received, received)
        return self._outcome(received.request_id, load)

    def failed(self, part: P, failed: FailedKV) -> LoadOutcome[P]:
        load = self._close(failed.request_id, part)
        if load is None:
            return None
        if failed.is_postponed:
            load.postponed.add(part)
        if load.failed is not None:
            load.failed = _least(load.failed, failed)
            return self._outcome(failed.request_id, load)
        load.failed = failed
        if load.open and not load.is_aborted:
            command = GiveUpLoad(failed.request_id, failed.reason, failed.is_unneeded, failed.is_postponed)
            return GiveUp(command, tuple(load.open))
        return self._outcome(failed.request_id, load)

    def quiesced(self, request_id: str, part: P) -> LoadOutcome[P]:
        """Reports that an aborted part has ended."""
        load = self._close(request_id, part)
        return None if load is None else self._outcome(request_id, load)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def _close(self, request_id: str, part: P) -> _Load[P] | None:
        """The load that a part reports on. None if it is unknown, or if the part reported before."""
        load = self._loads.get(request_id)
        if load is None or part not in load.open:
            return None
        load.open.remove(part)
        return load

    def _outcome(self, request_id: str, load: _Load[P]) -> LoadOutcome[P]:
        if load.open:
            return None
        is_postponed = load.failed is not None and load.failed.is_postponed
        if is_postponed and load.received is not None and not load.is_aborted:
            load.open, load.postponed, load.failed = load.postponed, set(), None
            return LoadAgain(replace(load.command, may_be_postponed=False), tuple(load.open))
        del self._loads[request_id]
        if load.is_aborted:
            return LoadQuiesced()
        return load.received if load.failed is None else load.failed


def _sum(one: ReceivedKV, other: ReceivedKV) -> ReceivedKV:
    return replace(
        one,
        num_bytes=one.num_bytes + other.num_bytes,
        elapsed_s=max(one.elapsed_s, other.elapsed_s),
        moving_s=max(one.moving_s, other.moving_s),
    )


def _least(one: FailedKV, other: FailedKV) -> FailedKV:
    """The blocks that are valid in both failures, and the first failure's reason."""
    return replace(
        one,
        num_valid_blocks=min(one.num_valid_blocks, other.num_valid_blocks),
        is_unneeded=one.is_unneeded or other.is_unneeded,
        is_postponed=one.is_postponed and other.is_postponed,
    )


class Sends(Generic[P]):
    """The sends that are not finished, and for each the parts that the peer may still read."""

    def __init__(self) -> None:
        self._open: dict[str, set[P]] = {}

    def begin(self, request_id: str, parts: Iterable[P]) -> None:
        self._open[request_id] = set(parts)

    def freed(self, request_id: str, part: P) -> bool:
        """Records that the peer will not read this part any more. Returns True if this was the last part that the peer
        might read."""
        parts = self._open.get(request_id)
        if parts is None or part not in parts:
            return False
        parts.remove(part)
        if parts:
            return False
        del self._open[request_id]
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def forget(self, request_id: str) -> None:
        """Drops a request without reporting the end of its send."""
        self._open.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._open)
