"""ConsumerEndpoint: connects the consumer's state machine to this rank's pool and to transports.

Its driver makes one call at a time; see connector/endpoint.py.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from baton.clock import Clock
from baton.kv import TransferRole
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from baton.transfer import TransferEventKind
from kv_transfer.commands import AbortLoad, BeginLoad, GiveUpLoad, LoadBlocks
from kv_transfer.consumer.block_writer import BlockWriter, WrittenPieces
from kv_transfer.consumer.remote_pools import PoolKey, RemotePools
from kv_transfer.parts import GiveUp, LoadAgain, LoadOutcome, LoadQuiesced, Loads, RankTransfers
from kv_transfer.pool import PieceView, RankPool
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.effects import (
    CanLoad,
    Effect,
    Failed,
    OpenPool,
    Peer,
    Quiesced,
    RankTransfer,
    Received,
    Send,
)
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.protocol.messages import TO_PRODUCER, Pieces, ToConsumer, TransferKey, Unreadable
from kv_transfer.protocol.transports import SENDS_BYTES
from kv_transfer.records import PeerMetrics, Timelines
from kv_transfer.transport.base import Channel, PoolReader, TransportError

logger = logging.getLogger(__name__)

ConsumerCommand = BeginLoad | LoadBlocks | AbortLoad | GiveUpLoad


class ConsumerEndpoint:
    """Every hand-over that this rank consumes."""

    def __init__(
        self,
        incarnation: str,
        pool: RankPool,
        channel: Channel,
        readers: Mapping[str, PoolReader],
        consumer: Consumer,
        counters: "Counter[str]",
        metrics: PeerMetrics,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._channel = channel
        self._consumer = consumer
        self._counters = counters
        self._metrics = metrics
        self._clock = clock
        self._rank_transfers = RankTransfers(incarnation, pool)
        self._loads: Loads[RankTransfer] = Loads()
        self._timelines = Timelines(clock)
        self._pools = RemotePools(readers, clock)
        self._writer = BlockWriter(pool)
        self.output = KVConnectorOutput()
        """Outcomes and records of loads, until the connector takes them."""

    def execute(self, command: ConsumerCommand, issued_at: float | None = None) -> None:
        """See TransferEndpoint."""
        match command:
            case BeginLoad():
                self._begin(command, issued_at)
            case LoadBlocks():
                self._load(command)
            case AbortLoad():
                self._abort(command)
            case GiveUpLoad():
                sides = self._rank_transfers.of(command.request_id)
                self._give_up([side.rank_transfer for side in sides], command)

    def on_message(self, peer: Peer, message: ToConsumer) -> None:
        """Handles a producer's message; the channel still has the payload of `Pieces`."""
        if isinstance(message, Pieces):
            self._take_pieces(message)
            return
        self._do(self._consumer.on_message(message, self._clock.now()))
        if isinstance(message, Unreadable) and not message.is_damaged:
            self.on_other_protocol(peer, message.reason)

    def on_other_protocol(self, peer: Peer, reason: str) -> None:
        """Call it if the producer's protocol is incompatible with ours. Loads from this producer then fail at once."""
        assert isinstance(peer, str), "consumers identify producers by address"
        why = f"protocol mismatch with the prefill worker: {reason}"
        self._do(self._consumer.on_other_protocol(peer, why))

    def on_gone(self, address: str) -> None:
        """Call it if nothing listens at this producer's address any more. Loads from this producer then fail at
        once."""
        self._do(self._consumer.on_gone(address))

    def fileno(self) -> int:
        """A file descriptor that is readable while `on_time` has something to do at once."""
        return self._pools.fileno()

    def on_time(self) -> None:
        self._collect()
        self._do(self._consumer.on_time(self._clock.now()))
        self._pools.close_orphaned()
        self._pools.close_unused(self._consumer.knows)

    def next_deadline(self) -> float | None:
        times = [self._consumer.next_deadline(), self._pools.next_deadline()]
        if self._writer.poll_interval_s is not None:
            times.append(self._clock.now() + self._writer.poll_interval_s)
        return min((time for time in times if time is not None), default=None)

    def close(self) -> None:
        """Ends every read, and closes the readers."""
        self._pools.close()
        self._writer.close()

    def check_integrity(self) -> None:
        """See TransferEndpoint."""
        self._consumer.check_integrity()
        assert len(self._timelines) == len(self._rank_transfers)

    def __len__(self) -> int:
        return max(len(self._consumer), len(self._rank_transfers))

    # commands

    def _begin(self, command: BeginLoad, issued_at: float | None) -> None:
        now = self._clock.now()
        self._timelines.begin(command.request_id, command.transfer, issued_at)
        for side in self._rank_transfers.open(command.request_id, command.transfer):
            self._do(
                self._consumer.begin(
                    side.rank_transfer, side.key, side.address, command.num_tokens, side.view.shape, now
                )
            )

    def _load(self, command: LoadBlocks) -> None:
        request_id = command.request_id
        sides = self._rank_transfers.of(request_id)
        self._timelines.mark(request_id, TransferEventKind.ASKED)
        if (refusal := self._rank_transfers.refusal(request_id)) is not None:
            reason = f"the workers do not match: {refusal}"
            self._rank_transfers.close(request_id)
            self._timelines.part_ended(
                request_id, TransferEventKind.FAILED, reason=reason, is_link_failure=True
            )
            failed, transfers = FailedKV(request_id, 0, reason), self._timelines.conclude(request_id)
            self.output += KVConnectorOutput(failed_recving=(failed,), transfers=transfers)
            return
        rank_transfers = [side.rank_transfer for side in sides]
        self._loads.begin(command, rank_transfers)
        self._load_rank_transfers(command, rank_transfers)

    def _load_rank_transfers(self, command: LoadBlocks, rank_transfers: Iterable[RankTransfer]) -> None:
        layout, now = self._pool.layout, self._clock.now()
        first_position = command.first_index // layout.groups.num_groups * layout.block_size
        effects: list[Effect] = []
        for rank_transfer in rank_transfers:  # begin all before `_do`: if one fails, `_do` ends the others
            effects += self._consumer.load(
                rank_transfer, first_position, command.block_ids, now, command.may_be_postponed
            )
        self._do(effects)

    def _abort(self, command: AbortLoad) -> None:
        is_loading = command.request_id in self._loads
        self._loads.abort(command.request_id)
        for side in self._rank_transfers.of(command.request_id):
            self._do(self._consumer.abort(side.rank_transfer, command.reason))
        if not is_loading:
            self._rank_transfers.close(command.request_id)
            self._timelines.forget(command.request_id)

    def _give_up(self, rank_transfers: Iterable[RankTransfer], command: GiveUpLoad) -> None:
        reason, now = command.reason, self._clock.now()
        for rank_transfer in rank_transfers:
            self._do(
                self._consumer.give_up(rank_transfer, reason, now, command.is_unneeded, command.is_postponed)
            )

    # pieces

    def _take_pieces(self, message: Pieces) -> None:
        wanted = self._consumer.wanted(message, self._clock.now())
        if wanted is None:
            return
        side = self._rank_transfers.at(message.key)
        self._timelines.mark(side.rank_transfer.request_id, TransferEventKind.FIRST_PIECE)
        if wanted.transport in SENDS_BYTES:
            self._writer.receive(wanted, side.view, self._channel.read_payload())
        else:
            self._read(wanted, side.view)
        self._collect()

    def _read(self, wanted: WantedPieces, view: PieceView) -> None:
        message = wanted.message
        peers = [message.piece_ids[position] for position in wanted.positions]
        try:
            runs = view.runs(peers, wanted.piece_ids)
            self._pools.read(_pool_key(message.key, wanted.transport), wanted, runs)
        except (TransportError, OverflowError) as error:  # a wrong piece id may be too large for an index
            self._on_read_failed(wanted, str(error))

    def _collect(self) -> None:
        """Handles the reads and writes that have ended."""
        for wanted, error in self._pools.finished():
            if error is None:
                self._writer.on_read(wanted, self._rank_transfers.at(wanted.message.key).view)
            else:
                self._on_read_failed(wanted, error)
        for written in self._writer.poll():
            self._on_written(written)

    def _on_written(self, written: WrittenPieces) -> None:
        """Counts the bytes, and reports every piece to the state machine."""
        wanted = written.wanted
        side = self._rank_transfers.at(wanted.message.key)
        num_bytes = written.num_arrived * side.view.nbytes
        self._counters["kv_bytes_received"] += num_bytes
        self._metrics.moved(TransferRole.CONSUMER, side.peer, wanted.transport, num_bytes)
        self._timelines.moved(side.rank_transfer.request_id, wanted.transport, num_bytes)
        self._do(self._consumer.on_arrived(wanted, written.damaged, self._clock.now()))

    def _on_read_failed(self, wanted: WantedPieces, error: str) -> None:
        logger.warning("cannot read the KV of %s: %s", wanted.message.key.producer, error)
        self._do(self._consumer.on_read_failed(wanted, error, self._clock.now()))

    def _open_pool(self, effect: OpenPool) -> None:
        try:
            self._pools.open(_pool_key(effect.key, effect.transport), effect.description)
        except TransportError as error:
            logger.warning("cannot open the KV pool of %s: %s", effect.key.producer, error)
            now = self._clock.now()
            self._do(self._consumer.on_unreachable(effect.key, effect.transport, str(error), now))

    # effects

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._channel.send(peer, TO_PRODUCER.encode(message))  # type: ignore[arg-type]
                case OpenPool():
                    self._open_pool(effect)
                case Received():
                    self._take_received(effect)
                case Failed():
                    self._take_failed(effect)
                case CanLoad(rank_transfer):
                    self.output += KVConnectorOutput(can_load=(rank_transfer.request_id,))
                case Quiesced(rank_transfer, transport, has_failed):
                    self._metrics.missed(
                        self._rank_transfers.peer_of(rank_transfer), transport, is_needed=has_failed
                    )
                    self._conclude(
                        rank_transfer.request_id,
                        self._loads.quiesced(rank_transfer.request_id, rank_transfer),
                    )

    def _take_received(self, received: Received) -> None:
        rank_transfer, transport = received.rank_transfer, received.transport
        side = self._rank_transfers.find(rank_transfer)
        assert side is not None, f"{rank_transfer} arrived after its request had ended"
        self._metrics.received(
            side.peer, transport, received.elapsed_s - received.moving_s, received.moving_s
        )
        self._timelines.part_ended(rank_transfer.request_id, TransferEventKind.VERIFIED, transport)
        arrived = ReceivedKV(
            rank_transfer.request_id,
            received.first_token,
            num_bytes=received.num_pieces * side.view.nbytes,
            elapsed_s=received.elapsed_s,
            moving_s=received.moving_s,
            transport=transport,
        )
        self._conclude(rank_transfer.request_id, self._loads.arrived(rank_transfer, arrived))

    def _take_failed(self, failed: Failed) -> None:
        rank_transfer, transport, is_unneeded = failed.rank_transfer, failed.transport, failed.is_unneeded
        if not failed.is_postponed:
            self._metrics.missed(
                self._rank_transfers.peer_of(rank_transfer), transport, is_needed=not is_unneeded
            )
            kind = TransferEventKind.NOT_NEEDED if is_unneeded else TransferEventKind.FAILED
            self._timelines.part_ended(
                rank_transfer.request_id,
                kind,
                transport,
                failed.reason,
                is_link_failure=failed.is_link_failure,
            )
        num_blocks = failed.num_valid_tokens // self._pool.layout.block_size
        failure = FailedKV(
            rank_transfer.request_id,
            num_blocks,
            failed.reason,
            is_unneeded,
            is_postponed=failed.is_postponed,
        )
        self._conclude(rank_transfer.request_id, self._loads.failed(rank_transfer, failure))

    def _conclude(self, request_id: str, outcome: LoadOutcome[RankTransfer]) -> None:
        """Reports the request's outcome, if its last rank transfer has ended."""
        match outcome:
            case GiveUp(give_up, rank_transfers):
                self._give_up(rank_transfers, give_up)
            case LoadAgain(command, rank_transfers):
                self._load_rank_transfers(command, rank_transfers)
            case FailedKV(is_postponed=True):
                self.output += KVConnectorOutput(failed_recving=(outcome,))
            case FailedKV():
                if not outcome.is_unneeded:
                    logger.warning(
                        "the KV cache of request %s did not arrive: %s",
                        request_id,
                        outcome.reason,
                        extra={"engine_request_id": request_id},
                    )
                self._close(request_id)
                transfers = self._timelines.conclude(request_id)
                self.output += KVConnectorOutput(failed_recving=(outcome,), transfers=transfers)
            case ReceivedKV():
                self._close(request_id)
                transfers = self._timelines.conclude(request_id)
                self.output += KVConnectorOutput(finished_recving=(outcome,), transfers=transfers)
            case LoadQuiesced():
                self._close(request_id)
                self._timelines.forget(request_id)
                self.output += KVConnectorOutput(quiesced=(request_id,))

    def _close(self, request_id: str) -> None:
        """Closes an ended load, and aborts rank transfers that were postponed before another one failed."""
        for side in self._rank_transfers.of(request_id):
            self._do(self._consumer.abort(side.rank_transfer, "the load failed on another rank"))
        self._rank_transfers.close(request_id)


def _pool_key(key: TransferKey, transport: str) -> PoolKey:
    return key.producer, key.producer_rank, transport
