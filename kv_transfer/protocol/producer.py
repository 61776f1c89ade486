"""Producer: every rank transfer that this rank sends, as one sans-IO state machine; see outgoing.py for its states.

A lease starts when the prefill ends, and restarts with every message of the consumer. During prefill, the
request's own deadline applies instead. The state EARLY ends one lease after the consumer's last message, and
at the latest after MAX_EARLY_LEASES leases. The producer remembers how rank transfers ended, to answer late
questions. It refuses messages for another incarnation.

The producer does not control when its pool is read: the consumer reads it directly, or the channel sends from
it without a copy. A read may still run when a preemption withdraws the blocks. So only pieces that were
acknowledged before the withdrawal count. All others are offered again, as another version. The consumer
relies on the End message, which is sent after the last acknowledgement.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from baton.request import FirstToken
from baton.system.standstill import Standstill
from kv_transfer.protocol.effects import Effect, Freed, Peer, RankTransfer, Send, SendPieces, Unwanted
from kv_transfer.protocol.geometry import PieceShape
from kv_transfer.protocol.messages import (
    Aborted,
    Ack,
    Cancel,
    End,
    Hold,
    Open,
    Opened,
    Refused,
    Release,
    ToProducer,
    TransferKey,
)
from kv_transfer.protocol.outgoing import (
    Farewell,
    OutgoingState,
    OutgoingTransfer,
    ProducerIdentity,
    SendWindow,
)
from kv_transfer.protocol.table import RankTransferTable
from kv_transfer.protocol.timers import Timers

MAX_EARLY = 1024
"""The most rank transfers that consumers may announce before this worker's engine knows of them."""

MAX_EARLY_LEASES = 12
"""For how many leases a consumer may wait until our engine knows of its request; a step may be long."""

MAX_ENDED = 4096
"""The most ended rank transfers that are remembered."""

ENDS = ("kv_sends_done", "kv_sends_aborted", "kv_sends_cancelled", "kv_sends_refused", "kv_lease_expiries")
"""Counters of how rank transfers ended. Each one that our engine began increments one of them, once."""


class Producer:
    """Call it with commands, messages and the time; carry out the effects it returns."""

    def __init__(
        self, identity: ProducerIdentity, lease_s: float, window_bytes: int, counters: Counter[str]
    ) -> None:
        self._identity = identity
        self._lease_s = lease_s
        self._window = SendWindow(window_bytes)
        self._counters = counters
        self._transfers: RankTransferTable[OutgoingTransfer] = RankTransferTable()
        self._num_early = 0
        self._is_starved = False
        self._standstill = Standstill(lease_s / 4)
        self._leases: Timers[TransferKey] = Timers(self._standstill)
        self._farewells: dict[TransferKey, Farewell] = {}
        """The rank transfers that ended last, and how each ended, for consumers that may not have been notified."""

    # commands of this worker's engine

    def note_starvation(self, is_starved: bool) -> list[Effect]:
        """Notes whether prompts are queued, but none can be computed. If this makes us stuck, notifies the consumers
        that keep room for incomplete prompts."""
        self._is_starved = is_starved
        if not self._is_stuck():
            return []
        waiting = [transfer for transfer in self._transfers.values() if transfer.is_awaited]
        return [Send(transfer.peer, self._opened(transfer)) for transfer in waiting]

    def begin(
        self,
        rank_transfer: RankTransfer,
        key: TransferKey,
        num_tokens: int,
        shape: PieceShape,
        piece_nbytes: int,
    ) -> list[Effect]:
        """The engine accepted the request, and computes it unless the consumer was refused, or has cancelled.

        A second request with the same key is never served.
        """
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = OutgoingTransfer(key, OutgoingState.PREPARING)
            self._transfers.add(transfer)
            if key in self._farewells:
                transfer.note_earlier_end(self._farewells[key])
        else:
            if transfer.rank_transfer is not None:
                self._counters["kv_duplicate_messages"] += 1
                return []
            self._num_early -= 1
            self._leases.cancel(key)
            if transfer.state is OutgoingState.EARLY:
                transfer.move_to(OutgoingState.PREPARING)
        transfer.rank_transfer, transfer.num_tokens = rank_transfer, num_tokens
        transfer.shape, transfer.piece_nbytes = shape, piece_nbytes
        self._transfers.bind(transfer)
        self._counters["kv_sends_started"] += 1
        if transfer.is_cancelled:  # the consumer cancelled before our engine knew of it
            self._counters["kv_sends_cancelled"] += 1
            return [Unwanted(rank_transfer)]
        if transfer.state is OutgoingState.PREPARING and transfer.open is not None:
            return self._open(transfer, transfer.open, transfer.peer)
        return []

    def blocks_ready(
        self, rank_transfer: RankTransfer, first_block: int, block_ids: Iterable[int | None]
    ) -> list[Effect]:
        """Offers computed blocks, which do not change until `Freed`. An id of None: no consumer needs that block."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None or transfer.is_cancelled:
            return []
        transfer.blocks_ready(first_block, block_ids)
        return self._offer_and_end(transfer)

    def withdraw(self, rank_transfer: RankTransfer) -> list[Effect]:
        """The request was preempted: its blocks are not offered until they are computed again."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None:
            return []
        transfer.withdraw()
        self._window.forget_inflight(transfer)
        return self._offer()

    def finish(self, rank_transfer: RankTransfer, first_token: FirstToken, now: float) -> list[Effect]:
        """The prefill is complete: the lease begins, and ends with `Freed`."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None:
            return [Freed(rank_transfer, reason="another request has claimed this transfer")]
        if transfer.is_cancelled:
            return self._forget(transfer)
        self._standstill.look(now)
        transfer.first_token, transfer.finished_at = first_token, now
        self._leases.set(transfer.key, now + self._lease_s)
        if transfer.is_postponed:
            return [Send(transfer.peer, self._opened(transfer))]
        return self._offer_and_end(transfer)

    def abort(self, rank_transfer: RankTransfer, reason: str, is_unneeded: bool) -> list[Effect]:
        """The request ended without a hand-over: notifies the consumer, and frees the blocks."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None:
            return [Freed(rank_transfer, reason="another request has claimed this transfer")]
        effects: list[Effect] = []
        farewell = Aborted(transfer.key, reason, is_unneeded)
        if transfer.peer and not transfer.is_cancelled:
            effects = [Send(transfer.peer, farewell)]
        self._count_end(transfer, "kv_sends_aborted", reason)
        if not transfer.is_cancelled:  # a cancelled one ended earlier, and our engine only frees its blocks
            transfer.is_needed = not is_unneeded
        self._remember(transfer, farewell)
        return effects + self._forget(transfer)

    # messages and time

    def on_message(self, peer: Peer, message: ToProducer, now: float) -> list[Effect]:
        key = message.key
        if key.producer != self._identity.incarnation or key.producer_rank != self._identity.layout.rank:
            self._counters["kv_foreign_messages"] += 1
            return [Send(peer, Aborted(key, "this worker has restarted; the blocks are gone", False))]
        transfer = self._transfers.get(key)
        if transfer is None:
            return self._on_unknown(peer, message, now)
        running = self._standstill.running(now)
        if transfer.first_token is not None:
            self._leases.set(key, now + self._lease_s)
        elif transfer.state is OutgoingState.EARLY:
            self._leases.set(key, now + min(self._lease_s, transfer.early_until - running))
        if transfer.is_cancelled:
            return self._on_late(peer, message)
        match message:
            case Hold(is_postponed=is_postponed):
                offers = self._postpone(transfer) if is_postponed else []
                if transfer.state is not OutgoingState.STREAMING:  # else an Open has overtaken the Hold
                    transfer.peer = peer
                return [Send(peer, self._opened(transfer)), *offers]
            case Open():
                return self._open(transfer, message, peer)
            case Ack():
                return self._on_ack(transfer, message)
            case Release():
                self._count_end(transfer, "kv_sends_done")
                if transfer.first_token is not None:
                    transfer.exposed_s = now - transfer.finished_at
                return self._close(transfer)
            case Cancel(reason=reason, is_unneeded=is_unneeded):
                transfer.is_needed = not is_unneeded
                self._count_end(transfer, "kv_sends_cancelled", reason)
                return self._close(transfer)

    def on_time(self, now: float) -> list[Effect]:
        """Ends expired leases, and notifies their consumers, which may be alive after all."""
        effects: list[Effect] = []
        for key in self._leases.pop_due(now):
            transfer = self._transfers[key]
            reason = f"the decode worker was silent for {self._lease_s:g} s"
            if transfer.rank_transfer is None:
                reason = "the prefill worker never received this request"
            self._count_end(transfer, "kv_lease_expiries", reason)
            farewell = Aborted(key, reason, is_unneeded=False)
            self._remember(transfer, farewell)
            if transfer.peer:
                effects.append(Send(transfer.peer, farewell))
            effects += self._forget(transfer)
        return effects

    def next_deadline(self) -> float | None:
        return self._leases.next()

    def __len__(self) -> int:
        return len(self._transfers)

    def check_integrity(self) -> None:
        """Asserts that every started rank transfer is either still running, or was counted as ended once, and that the
        peers' windows hold the bytes of the running ones."""
        known = [transfer for transfer in self._transfers.values() if transfer.rank_transfer is not None]
        assert len(known) == self._transfers.num_bound == len(self._transfers) - self._num_early
        num_ended = sum(self._counters[end] for end in ENDS)
        num_open = sum(not transfer.is_cancelled for transfer in known)
        assert self._counters["kv_sends_started"] == num_ended + num_open, (
            f"{num_open} open: {self._counters}"
        )
        self._window.check_integrity(self._transfers.values())

    def _opened(self, transfer: OutgoingTransfer) -> Opened:
        return transfer.answer(self._identity.offer, is_stuck=transfer.is_awaited and self._is_stuck())

    def _is_stuck(self) -> bool:
        """Whether our engine can compute nothing, and no consumer loads any of the complete prompts."""
        if not self._is_starved:
            return False
        complete = [transfer for transfer in self._transfers.values() if transfer.first_token is not None]
        return bool(complete) and all(transfer.state is OutgoingState.PREPARING for transfer in complete)

    def _postpone(self, transfer: OutgoingTransfer) -> list[Effect]:
        """The consumer gave its room back: no piece offered to it counts as unacknowledged any more.

        Offers pieces of other rank transfers, for which there is room in the peer's window now.
        """
        effects = self._leave_turns(transfer)
        transfer.postpone()
        return effects

    def _on_unknown(self, peer: Peer, message: ToProducer, now: float) -> list[Effect]:
        """Handles a message about a rank transfer that has ended, or that our engine does not know yet."""
        key = message.key
        if not isinstance(message, Open | Hold | Cancel) or key in self._farewells:
            return self._on_late(peer, message)
        if self._num_early >= MAX_EARLY:
            reason = f"{MAX_EARLY} hand-overs have been announced already"
            return [Send(peer, Aborted(key, reason, is_unneeded=False))]
        early_until = self._standstill.running(now) + MAX_EARLY_LEASES * self._lease_s
        early = OutgoingTransfer(key, OutgoingState.EARLY, peer=peer, early_until=early_until)
        self._transfers.add(early)
        self._num_early += 1
        self._leases.set(key, now + self._lease_s)
        if isinstance(message, Cancel):
            early.is_needed, early.end_reason = not message.is_unneeded, message.reason
            return self._close(early)
        if isinstance(message, Open):
            return self._open(early, message, peer)
        return [Send(peer, self._opened(early))]

    def _on_late(self, peer: Peer, message: ToProducer) -> list[Effect]:
        """If a consumer still asks, tells it how its rank transfer ended. All other messages are counted."""
        farewell = self._farewells.get(message.key)
        if farewell is not None and isinstance(message, Open | Hold):
            return [Send(peer, farewell)]
        self._counters["kv_late_messages"] += 1
        return []

    def _open(self, transfer: OutgoingTransfer, message: Open, peer: Peer) -> list[Effect]:
        """The consumer has room. A repeated Open lists the arrived pieces; lost ones are offered again."""
        if transfer.state is OutgoingState.EARLY:  # nothing was sent yet, so nothing can have arrived
            transfer.peer = peer
            transfer.open = replace(message, received=(), received_versions=())
            return [Send(peer, self._opened(transfer))]
        transport, reason = self._identity.choose(message, transfer.num_tokens)
        if transport is None:
            self._count_end(transfer, "kv_sends_refused", reason)
            refused = Refused(transfer.key, reason)
            return [Send(peer, refused), *self._close(transfer, refused)]
        if transfer.state is OutgoingState.PREPARING:
            transfer.move_to(OutgoingState.STREAMING)
        offered = transfer.unacked.keys() | transfer.acked
        self._window.reopen(transfer, message, peer, transport)
        self._counters["kv_pieces_resent"] += len(offered.intersection(transfer.unsent))
        return [Send(peer, self._opened(transfer)), *self._offer_and_end(transfer)]

    def _on_ack(self, transfer: OutgoingTransfer, message: Ack) -> list[Effect]:
        if message.version != transfer.version:
            self._counters["kv_late_messages"] += 1
            return []
        # A valid piece may be missing from `unacked`: if an Open came after the offer, the piece is queued to be
        # offered again.
        valid = {index for index in message.valid if index in transfer.ready and index not in transfer.acked}
        for index in valid:
            self._window.acknowledged(transfer, index)
        damaged = [index for index in message.damaged if self._window.acknowledged(transfer, index)]
        num_unknown = len(message.valid) + len(message.damaged) - len(valid) - len(damaged)
        self._counters["kv_duplicate_messages"] += num_unknown
        self._counters["kv_pieces_resent"] += len(damaged)
        transfer.arrived(valid)
        transfer.unsent.extend(damaged)
        return self._offer_and_end(transfer)

    def _offer_and_end(self, transfer: OutgoingTransfer) -> list[Effect]:
        """A rank transfer has changed: offers pieces, and ends it if nothing is left to send or to acknowledge."""
        if transfer.state is not OutgoingState.STREAMING:
            return self._offer()
        self._window.join(transfer)
        return self._offer() + self._end(transfer)

    def _offer(self) -> list[Effect]:
        """Offers what the peers' windows allow, in turns of a few pieces."""
        return [self._pieces_of(transfer, indices) for transfer, indices in self._window.next_turns()]

    def _pieces_of(self, transfer: OutgoingTransfer, indices: tuple[int, ...]) -> SendPieces:
        assert transfer.open is not None
        return SendPieces(
            transfer.peer,
            transfer.key,
            version=transfer.version,
            indices=indices,
            piece_ids=tuple([transfer.ready[index] for index in indices]),
            has_checksums=transfer.open.checksums.applies(self._identity.offer.host, transfer.open.host),
            transport=transfer.transport,
        )

    def _end(self, transfer: OutgoingTransfer) -> list[Effect]:
        """Sends End once, if everything was offered and no more will come."""
        if transfer.first_token is None or transfer.is_end_sent or transfer.unsent:
            return []
        if transfer.unacked:
            return []  # a piece may still be read; only an Ack shows that it was read in time
        transfer.is_end_sent = True
        end = End(transfer.key, transfer.version, transfer.num_pieces, transfer.first_token)
        return [Send(transfer.peer, end)]

    def _count_end(self, transfer: OutgoingTransfer, counter: str, reason: str = "") -> None:
        """Counts an end once, except for transfers that are counted as cancelled or that our engine never began."""
        transfer.end_reason = transfer.end_reason or reason
        if transfer.rank_transfer is not None and not transfer.is_cancelled:
            self._counters[counter] += 1

    def _close(self, transfer: OutgoingTransfer, farewell: Farewell = None) -> list[Effect]:
        """Ends the rank transfer for the consumer. Our engine keeps the blocks until it has ended the prompt."""
        self._remember(transfer, farewell)
        if transfer.first_token is not None:
            return self._forget(transfer)
        transfer.move_to(OutgoingState.CANCELLED)
        unwanted = [Unwanted(transfer.rank_transfer)] if transfer.rank_transfer is not None else []
        return [*unwanted, *self._leave_turns(transfer)]

    def _forget(self, transfer: OutgoingTransfer) -> list[Effect]:
        """Drops the rank transfer, and frees its blocks if the engine holds any for it."""
        self._transfers.remove(transfer)
        self._leases.cancel(transfer.key)
        effects = self._leave_turns(transfer)
        if transfer.rank_transfer is None:
            self._num_early -= 1
            return effects
        freed = Freed(
            transfer.rank_transfer,
            transfer.transport,
            exposed_s=transfer.exposed_s,
            is_needed=transfer.is_needed,
            reason=transfer.end_reason,
        )
        return [*effects, freed]

    def _remember(self, transfer: OutgoingTransfer, farewell: Farewell) -> None:
        """Stores the farewell for late questions. Only the first one counts: it says why the rank transfer ended."""
        self._farewells.setdefault(transfer.key, farewell)
        if len(self._farewells) > MAX_ENDED:
            del self._farewells[next(iter(self._farewells))]

    def _leave_turns(self, transfer: OutgoingTransfer) -> list[Effect]:
        self._window.leave(transfer)
        return self._offer()
