"""ProducerEndpoint: connects the producer's state machine to this rank's pool and to a channel.

If the pool is on a device, bytes and checksums are first copied to the host, and the message is sent
afterwards. The message is dropped if meanwhile a preemption withdraws the blocks or the hand-over ends.

Its driver makes one call at a time; see connector/endpoint.py.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from baton.clock import Clock
from baton.kv import TransferRole
from baton.step import KVConnectorOutput
from baton.transfer import TransferEventKind
from kv_transfer.commands import (
    AbortSend,
    BeginSend,
    FinishSend,
    NoteStarvation,
    SendBlocks,
    WithdrawBlocks,
)
from kv_transfer.cuda.staging import Stager, make_stager
from kv_transfer.parts import RankTransfers, Sends
from kv_transfer.pool import HostPieces, RankPool
from kv_transfer.protocol.effects import Effect, Freed, Peer, RankTransfer, Send, SendPieces, Unwanted
from kv_transfer.protocol.messages import TO_CONSUMER, Pieces, ToProducer, TransferKey
from kv_transfer.protocol.producer import Producer
from kv_transfer.records import PeerMetrics, Timelines
from kv_transfer.transport.base import Bytes, Channel

logger = logging.getLogger(__name__)

ProducerCommand = BeginSend | NoteStarvation | SendBlocks | WithdrawBlocks | FinishSend | AbortSend


class ProducerEndpoint:
    """Every hand-over that this rank produces."""

    def __init__(
        self,
        incarnation: str,
        pool: RankPool,
        channel: Channel,
        producer: Producer,
        counters: "Counter[str]",
        metrics: PeerMetrics,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._producer = producer
        self._counters = counters
        self._metrics = metrics
        self._clock = clock
        self._rank_transfers = RankTransfers(incarnation, pool)
        self._stager: Stager[SendPieces] | None = make_stager(pool)
        self._open: Sends[RankTransfer] = Sends()
        self._timelines = Timelines(clock)
        self.output = KVConnectorOutput()
        """Freed and unwanted requests, and records of hand-overs, until the connector takes them. A request
        with several rank transfers may be listed as unwanted several times.
        """

    def execute(self, command: ProducerCommand, issued_at: float | None = None) -> None:
        """See TransferEndpoint. After `WithdrawBlocks`, its blocks are not offered any more."""
        if isinstance(command, NoteStarvation):
            self._do(self._producer.note_starvation(command.is_starved))
            return
        request_id, now, output = command.request_id, self._clock.now(), self.output
        if isinstance(command, BeginSend):
            self._begin(command, issued_at)
            return
        if isinstance(command, FinishSend):
            self._timelines.mark(request_id, TransferEventKind.PREFILLED)
        if isinstance(command, FinishSend | AbortSend) and self._rank_transfers.has_none(request_id):
            self._end_without_transfers(command)
        for side in self._rank_transfers.of(request_id):
            match command:
                case SendBlocks(first_index=first, block_ids=block_ids):
                    self._do(self._producer.blocks_ready(side.rank_transfer, first, block_ids))
                case WithdrawBlocks():
                    self._drop_staged(side.key)
                    self._do(self._producer.withdraw(side.rank_transfer))
                case FinishSend(num_blocks=num_blocks, tail_block_ids=tail, first_token=first_token):
                    self._do(self._producer.blocks_ready(side.rank_transfer, num_blocks - len(tail), tail))
                    self._do(self._producer.finish(side.rank_transfer, first_token, now))
                case AbortSend(reason=reason, is_unneeded=is_unneeded):
                    self._do(self._producer.abort(side.rank_transfer, reason, is_unneeded))
        if isinstance(command, AbortSend) and not command.is_held:
            self.output = output  # the request had no blocks, so none are reported free

    def on_message(self, peer: Peer, message: ToProducer) -> None:
        self._do(self._producer.on_message(peer, message, self._clock.now()))

    def on_time(self) -> None:
        self._send_staged()
        self._do(self._producer.on_time(self._clock.now()))

    def next_deadline(self) -> float | None:
        deadline = self._producer.next_deadline()
        if self._stager is None or self._stager.poll_interval_s is None:
            return deadline
        poll_at = self._clock.now() + self._stager.poll_interval_s
        return poll_at if deadline is None else min(deadline, poll_at)

    def close(self) -> None:
        """Closes the stager; after this call, no copy from our pool runs for this producer."""
        if self._stager is not None:
            self._stager.close()

    def check_integrity(self) -> None:
        """See TransferEndpoint."""
        self._producer.check_integrity()
        assert len(self._timelines) == len(self._rank_transfers) == len(self._open)

    def __len__(self) -> int:
        return max(len(self._producer), len(self._rank_transfers))

    def _begin(self, command: BeginSend, issued_at: float | None) -> None:
        sides = self._rank_transfers.open(command.request_id, command.transfer)
        self._timelines.begin(command.request_id, command.transfer, issued_at)
        self._open.begin(command.request_id, [side.rank_transfer for side in sides])
        for side in sides:
            self._do(
                self._producer.begin(
                    side.rank_transfer, side.key, command.num_tokens, side.view.shape, side.view.nbytes
                )
            )

    def _end_without_transfers(self, command: FinishSend | AbortSend) -> None:
        """Ends a hand-over without rank transfers: the workers do not match, or other ranks send all of the KV."""
        reason = self._rank_transfers.refusal(command.request_id)
        if reason is not None:
            kind = TransferEventKind.FAILED
        elif isinstance(command, FinishSend):
            kind = TransferEventKind.RELEASED
        else:
            kind = TransferEventKind.NOT_NEEDED if command.is_unneeded else TransferEventKind.FAILED
            reason = command.reason
        self._timelines.part_ended(command.request_id, kind, reason=reason or "")
        self._conclude(command.request_id)

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._channel.send(peer, TO_CONSUMER.encode(message))  # type: ignore[arg-type]
                case SendPieces():
                    self._send_pieces(effect)
                case Unwanted(rank_transfer):
                    self.output += KVConnectorOutput(unwanted=(rank_transfer.request_id,))
                case Freed():
                    self._take_freed(effect)

    def _take_freed(self, freed: Freed) -> None:
        rank_transfer, transport, is_needed = freed.rank_transfer, freed.transport, freed.is_needed
        self._metrics.sent(self._rank_transfers.peer_of(rank_transfer), transport, freed.exposed_s, is_needed)
        kind = TransferEventKind.FAILED if is_needed else TransferEventKind.NOT_NEEDED
        if freed.exposed_s is not None:
            kind = TransferEventKind.RELEASED
        self._timelines.part_ended(rank_transfer.request_id, kind, transport, freed.reason)
        if self._open.freed(rank_transfer.request_id, rank_transfer):
            self._conclude(rank_transfer.request_id)

    def _conclude(self, request_id: str) -> None:
        """Reports the end of a hand-over once the peer reads none of its rank transfers any more."""
        for side in self._rank_transfers.of(request_id):
            self._drop_staged(side.key)
        self._rank_transfers.close(request_id)
        self._open.forget(request_id)
        transfers = self._timelines.conclude(request_id)
        self.output += KVConnectorOutput(finished_sending=(request_id,), transfers=transfers)

    def _send_pieces(self, effect: SendPieces) -> None:
        view, ids = self._rank_transfers.at(effect.key).view, effect.piece_ids
        has_bytes, has_checksums = effect.has_payload, effect.has_checksums
        if isinstance(view, HostPieces):
            checksums = [view.checksum(piece_id) for piece_id in ids] if has_checksums else []
            self._send(effect, checksums, view.spans(ids) if has_bytes else [])
        elif has_bytes or has_checksums:
            assert self._stager is not None, "pieces on a device need a pool on a device"
            self._stager.take_out(effect, view, ids, has_bytes=has_bytes, has_checksums=has_checksums)
        else:  # the consumer's device copies them by itself
            self._send(effect, [], [])

    def _send_staged(self) -> None:
        """Sends what was copied to the host since the last call."""
        for staged in self._stager.poll() if self._stager is not None else ():
            if staged.error is None:
                self._send(staged.what, staged.checksums, staged.spans)
            else:  # the consumer will ask again
                logger.warning("cannot copy KV from the device: %s", staged.error)

    def _drop_staged(self, key: TransferKey) -> None:
        """Drops pending copies to the host. Other requests will overwrite the blocks, so these copies may have wrong
        bytes, with checksums that match the wrong bytes."""
        if self._stager is not None:
            self._stager.drop(lambda effect: effect.key == key)

    def _send(self, effect: SendPieces, checksums: Sequence[int], payload: Sequence[Bytes]) -> None:
        side = self._rank_transfers.at(effect.key)
        header = Pieces(effect.key, effect.version, effect.indices, effect.piece_ids, tuple(checksums))
        if not self._channel.send(effect.peer, TO_CONSUMER.encode(header), payload):
            return  # the consumer will ask again
        num_bytes = len(effect.piece_ids) * side.view.nbytes
        self._counters["kv_bytes_sent"] += num_bytes
        self._metrics.moved(TransferRole.PRODUCER, side.peer, effect.transport, num_bytes)
        self._timelines.mark(side.rank_transfer.request_id, TransferEventKind.FIRST_PIECE)
        self._timelines.moved(side.rank_transfer.request_id, effect.transport, num_bytes)
