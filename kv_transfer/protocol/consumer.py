"""Consumer: every rank transfer that this rank receives, as one sans-IO state machine; see incoming.py for its states.

Hold and Open are repeated at a fixed pace while nothing arrives. A producer counts as lost if it is silent for too long
(waits.py), or if nothing listens at its address any more (`on_gone`). A load that takes longer than `load_timeout_s`
fails. Messages about unknown rank transfers are counted.
"""

from collections import Counter
from collections.abc import Collection

from kv_transfer.protocol.effects import (
    CanLoad,
    Effect,
    Failed,
    Notification,
    OpenPool,
    Quiesced,
    RankTransfer,
    Send,
)
from kv_transfer.protocol.geometry import PieceShape
from kv_transfer.protocol.incoming import (
    ConsumerIdentity,
    IncomingState,
    IncomingTransfer,
    Loss,
    WantedPieces,
    link_failure,
)
from kv_transfer.protocol.messages import (
    MAX_PIECES,
    MAX_VERSION,
    Aborted,
    Ack,
    Cancel,
    End,
    Hold,
    Opened,
    Pieces,
    Refused,
    Release,
    ToConsumer,
    TransferKey,
    Unreadable,
)
from kv_transfer.protocol.table import RankTransferTable
from kv_transfer.protocol.transports import SENDS_BYTES, TransportChoices
from kv_transfer.protocol.waits import Waits

MAX_BAD_PIECES = 16
"""A rank transfer with more bad pieces than this is given up, since the path is broken."""

ENDS = tuple(f"kv_loads_{end}" for end in ("received", "failed", "aborted", "not_needed", "postponed"))
"""Counters of how loads ended. Each rank transfer increments one of them, once per load."""


class Consumer:
    """Call it with commands, messages, pieces and the time; carry out the effects it returns."""

    def __init__(self, identity: ConsumerIdentity, counters: Counter[str]) -> None:
        self._identity = identity
        self._counters = counters
        self._transfers: RankTransferTable[IncomingTransfer] = RankTransferTable()
        self._waits = Waits(identity.heartbeat_s, identity.peer_timeout_s)
        self._choices = TransportChoices(identity.offer.transports)

    def begin(
        self,
        rank_transfer: RankTransfer,
        key: TransferKey,
        address: str,
        num_tokens: int,
        shape: PieceShape,
        now: float,
    ) -> list[Effect]:
        """The engine accepted the request. Asks the producer to keep the prompt's KV until there is room.

        A second request with the same key is never served. If a prompt has too many pieces, its load fails.
        """
        if key in self._transfers:
            self._counters["kv_duplicate_messages"] += 1
            return []
        transports = self._identity.offer.transports
        transfer = IncomingTransfer(key, rank_transfer, address, num_tokens, shape, transports)
        self._transfers.add(transfer)
        self._transfers.bind(transfer)
        self._waits.begin(key, now)
        if (num_pieces := shape.num_pieces_for(num_tokens)) > MAX_PIECES:
            reason = (
                f"the prompt of {num_tokens} tokens has {num_pieces} pieces of blocks; at most {MAX_PIECES} can be "
                "handed over. Set a larger scheduler.block_size for both roles"
            )
            return self._lose(transfer, Loss(reason))
        return self._ask(transfer, now)

    def load(
        self,
        rank_transfer: RankTransfer,
        first_position: int,
        block_ids: tuple[int | None, ...],
        now: float,
        may_be_postponed: bool = True,
    ) -> list[Effect]:
        """Starts to load into reserved blocks. They may be written until Received, Failed or Quiesced."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None:
            return [Failed(rank_transfer, 0, "another request has claimed this transfer", False)]
        transfer.reserve(first_position, block_ids, may_be_postponed)
        self._counters["kv_loads_started"] += 1
        if transfer.loss is not None:
            return self._end_load(transfer, self._failed(transfer, transfer.loss))
        transfer.move_to(IncomingState.LOADING)
        transfer.opened_at = now
        self._waits.begin_load(transfer.key, self._identity.load_timeout_s, now)
        return self._ask(transfer, now)

    def abort(self, rank_transfer: RankTransfer, reason: str) -> list[Effect]:
        """The request ended here: notifies the producer. An outcome that was returned before stays valid."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None:
            return []
        cancel = Send(transfer.address, Cancel(transfer.key, reason, is_unneeded=True))
        if transfer.state is IncomingState.DRAINING:
            failed = transfer.outcome
            if not isinstance(failed, Failed):
                return []
            has_failed = not (failed.is_unneeded or failed.is_postponed)
            transfer.outcome = Quiesced(rank_transfer, failed.transport, has_failed=has_failed)
            return [cancel] if failed.is_postponed else []
        if not transfer.is_loading:
            self._forget(transfer)
            return [cancel]
        self._counters["kv_loads_aborted"] += 1
        return [cancel, *self._end_load(transfer, Quiesced(rank_transfer, transfer.transport or ""))]

    def give_up(
        self, rank_transfer: RankTransfer, reason: str, now: float, is_unneeded: bool, is_postponed: bool
    ) -> list[Effect]:
        """Fails or postpones the load on this rank transfer, too, since the same load failed or was postponed on
        another one. Does nothing if the load has ended."""
        transfer = self._transfers.of(rank_transfer)
        if transfer is None or not transfer.is_loading:
            return []
        if is_postponed:
            return self._postpone(transfer, reason, now)
        return self._lose(transfer, Loss(reason, is_unneeded))

    # messages and time

    def on_message(self, message: ToConsumer, now: float) -> list[Effect]:
        """Handles all messages but `Pieces`, whose bytes are handled by `wanted` and `on_arrived`."""
        if isinstance(message, Unreadable):
            self._counters["kv_unreadable_messages"] += 1
            return []
        transfer = self._transfers.get(message.key)
        if transfer is not None:
            self._waits.on_message(message.key, now)
        if transfer is None or transfer.state in (IncomingState.LOST, IncomingState.DRAINING):
            self._counters["kv_late_messages"] += 1
            return []
        match message:
            case Opened(number=number):
                transfer.opened = max(transfer.opened, number)
                return self._on_opened(transfer, message, now)
            case Refused(reason=reason):
                loss = link_failure(f"the prefill worker refused: {reason}", from_producer=True)
                return self._lose(transfer, loss)
            case Aborted(reason=reason, is_unneeded=is_unneeded):
                return self._lose(transfer, Loss(reason, is_unneeded, from_producer=True))
            case End():
                return self._on_end(transfer, message, now)
            case Pieces():
                raise AssertionError("Pieces bring bytes: use wanted() and on_arrived()")

    def on_other_protocol(self, address: str, reason: str) -> list[Effect]:
        """Fails everything that waits for the producer at this address, which has an incompatible protocol."""
        return self._lose_all_from(address, link_failure(reason, from_producer=True))

    def on_gone(self, address: str) -> list[Effect]:
        """Fails everything that waits for the producer at this address, where nothing listens any more."""
        return self._lose_all_from(address, link_failure("the prefill worker no longer accepts connections"))

    def wanted(self, message: Pieces, now: float) -> WantedPieces | None:
        """Which of the announced pieces to write now. After the writes, call `on_arrived` or `on_read_failed`.

        All other pieces of the message are late or duplicate, belong to another hand-over, were announced before a
        transport was chosen, or have a version that no producer reaches. None: no piece is to be written.
        """
        transfer = self._transfers.get(message.key)
        if (
            transfer is None
            or not transfer.is_loading
            or transfer.transport is None
            or message.version > MAX_VERSION
        ):
            self._counters["kv_late_messages"] += 1
            return None
        assert transfer.producer_host is not None
        self._waits.on_message(message.key, now)
        num_bad = transfer.num_bad
        has_checksums = self._identity.checksums.applies(transfer.producer_host, self._identity.offer.host)
        wanted = transfer.claim(message, has_checksums, now)
        self._counters["kv_checksum_failures"] += transfer.num_bad - num_bad
        self._counters["kv_duplicate_messages"] += len(message.indices) - len(wanted.indices)
        return wanted if wanted.indices else None

    def on_arrived(self, pieces: WantedPieces, damaged: Collection[int], now: float) -> list[Effect]:
        """The writes of these pieces have ended; `damaged` has the indices of those that are missing or wrong.

        A damaged piece counts as bad only if it is offered again in the same version. If a preemption
        withdrew its block during the read, the piece is offered again in another version.
        """
        key, version = pieces.message.key, pieces.message.version
        transfer = self._transfers[key]
        for index in pieces.indices:
            del transfer.arriving[index]
        if transfer.state is IncomingState.DRAINING:
            return self._drain(transfer, now)
        self._waits.ask_later(key, now)
        valid = tuple([index for index in pieces.indices if index not in damaged])
        transfer.verified.update(dict.fromkeys(valid, version))
        effects: list[Effect] = [Send(transfer.address, Ack(key, version, valid, tuple(sorted(damaged))))]
        transfer.damaged.update(dict.fromkeys(damaged, version))
        if damaged and transfer.num_bad > MAX_BAD_PIECES:
            return effects + self._lose(transfer, link_failure(f"{transfer.num_bad} pieces arrived damaged"))
        return effects + self._complete(transfer, now)

    def on_read_failed(self, pieces: WantedPieces, reason: str, now: float) -> list[Effect]:
        """A read failed: this transport does not work between these two workers, so another one is tried."""
        transfer = self._transfers[pieces.message.key]
        for index in pieces.indices:
            del transfer.arriving[index]
        if transfer.state is IncomingState.DRAINING:
            return self._drain(transfer, now)
        if transfer.transport not in (pieces.transport, None):
            # Asks again. Meanwhile these pieces may have been offered over the new transport, and were not claimed.
            return self._ask(transfer, now)
        return self.on_unreachable(transfer.key, pieces.transport, reason, now)

    def on_unreachable(self, key: TransferKey, transport: str, reason: str, now: float) -> list[Effect]:
        """The transport cannot read the producer's pool. A load that uses it asks for another transport."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return []
        self._counters["kv_unreachable_pools"] += 1
        self._choices.note_failure(key.producer, key.producer_rank, transport, now)
        if not transfer.is_loading or transfer.transport != transport:
            return []  # the load has ended, or uses another transport now
        transfer.transport = None
        if not self._transports_to(transfer, now):
            return self._lose(transfer, link_failure(f"no transport reaches the prefill worker: {reason}"))
        return self._ask(transfer, now)

    def on_time(self, now: float) -> list[Effect]:
        """Repeats unanswered messages, and gives up transfers that took too long."""
        effects: list[Effect] = []
        for key in self._waits.pop_overdue(now):
            reason = f"the prompt's KV cache did not arrive within {self._identity.load_timeout_s:g} s"
            effects += self._lose(self._transfers[key], Loss(reason))
        for key, silent_s, limit_s in self._waits.pop_questions(now):
            transfer = self._transfers[key]
            if silent_s > limit_s:
                loss = link_failure(f"the prefill worker was silent for {silent_s:.1f} s")
                effects += self._lose(transfer, loss)
            else:
                effects += self._ask(transfer, now)
        return effects

    def next_deadline(self) -> float | None:
        return self._waits.next()

    def knows(self, producer: str) -> bool:
        """Whether any rank transfer comes from this incarnation."""
        return self._transfers.has_from(producer)

    def __len__(self) -> int:
        return len(self._transfers)

    def check_integrity(self) -> None:
        """Asserts that every started load is either still running, or was counted as ended once."""
        counts = self._counters
        num_ended = sum(counts[end] for end in ENDS)
        num_loading = sum(transfer.is_loading for transfer in self._transfers.values())
        assert counts["kv_loads_started"] == num_ended + num_loading, f"{num_loading} load: {counts}"
        assert self._transfers.num_bound == len(self._transfers)

    def _transports_to(self, transfer: IncomingTransfer, now: float) -> tuple[str, ...]:
        """Transports that this rank transfer may still use. Only later rank transfers retry failed transports."""
        remaining = self._choices.usable_to(transfer.key.producer, transfer.key.producer_rank, now)
        transfer.choices = tuple(name for name in transfer.choices if name in remaining)
        return transfer.choices

    def _ask(self, transfer: IncomingTransfer, now: float) -> list[Effect]:
        """Sends Hold, or an Open that lists what has arrived and so requests everything else."""
        self._waits.ask_later(transfer.key, now)
        if transfer.state is IncomingState.HOLDING:
            return [Send(transfer.address, Hold(transfer.key, transfer.is_postponed))]
        return [Send(transfer.address, transfer.ask(self._identity, self._transports_to(transfer, now)))]

    def _on_opened(self, transfer: IncomingTransfer, message: Opened, now: float) -> list[Effect]:
        if message.is_stuck and transfer.is_loading and transfer.may_be_postponed:
            reason = "the prefill worker computes nothing until other prompts are loaded"
            return self._postpone(transfer, reason, now)
        if message.is_complete and transfer.state is IncomingState.HOLDING:
            return self._can_load(transfer)
        if not transfer.is_loading or message.transport is None:
            # No transport: the answer to a Hold, or to an Open for a request that the producer's engine did not know
            # yet.
            return []
        if message.transport not in self._transports_to(transfer, now):
            return []  # an answer to an older Open
        transfer.producer_host, transfer.transport = message.host, message.transport
        if message.transport in SENDS_BYTES:
            return []
        return [OpenPool(transfer.key, message.transport, message.pool)]

    def _on_end(self, transfer: IncomingTransfer, message: End, now: float) -> list[Effect]:
        if not transfer.is_loading:
            self._counters["kv_late_messages"] += 1
            return []
        if message.num_pieces != transfer.first_piece + transfer.num_pieces:
            expected = transfer.first_piece + transfer.num_pieces
            return self._lose(transfer, Loss(f"{message.num_pieces} pieces were sent, {expected} expected"))
        transfer.end = message
        return self._complete(transfer, now)

    def _complete(self, transfer: IncomingTransfer, now: float) -> list[Effect]:
        if not transfer.is_complete:
            return []
        self._forget(transfer)
        self._counters["kv_loads_received"] += 1
        return [Send(transfer.address, Release(transfer.key)), transfer.received(now)]

    def _lose_all_from(self, address: str, loss: Loss) -> list[Effect]:
        live = (IncomingState.HOLDING, IncomingState.LOADING)
        transfers = [known for known in self._transfers.values() if known.address == address]
        lost = [transfer for transfer in transfers if transfer.state in live]
        return [effect for transfer in lost for effect in self._lose(transfer, loss)]

    def _lose(self, transfer: IncomingTransfer, loss: Loss) -> list[Effect]:
        """No more pieces will arrive: fails the load, or remembers the loss for a later load."""
        cancel = Cancel(transfer.key, loss.reason, loss.is_unneeded)
        effects: list[Effect] = [] if loss.from_producer else [Send(transfer.address, cancel)]
        if transfer.state is IncomingState.HOLDING:
            transfer.loss = loss
            transfer.move_to(IncomingState.LOST)
            self._waits.pause(transfer.key)
            return effects + self._can_load(transfer)
        return effects + self._end_load(transfer, self._failed(transfer, loss))

    def _failed(self, transfer: IncomingTransfer, loss: Loss) -> Failed:
        self._counters["kv_loads_not_needed" if loss.is_unneeded else "kv_loads_failed"] += 1
        return transfer.failed(loss)

    def _end_load(self, transfer: IncomingTransfer, outcome: Notification) -> list[Effect]:
        """Reports the outcome at once, or when the current writes have ended."""
        if not transfer.arriving:
            self._forget(transfer)
            return [outcome]
        transfer.move_to(IncomingState.DRAINING)
        transfer.outcome = outcome
        self._waits.pause(transfer.key)
        return []

    def _drain(self, transfer: IncomingTransfer, now: float) -> list[Effect]:
        if transfer.arriving:
            return []
        assert transfer.outcome is not None
        if isinstance(transfer.outcome, Failed) and transfer.outcome.is_postponed:
            return self._hold_again(transfer, transfer.outcome, now)
        self._forget(transfer)
        return [transfer.outcome]

    def _postpone(self, transfer: IncomingTransfer, reason: str, now: float) -> list[Effect]:
        """Ends the load. After the current writes, its room is given back, and the rank transfer is HOLDING again."""
        self._counters["kv_loads_postponed"] += 1
        outcome = transfer.failed(Loss(reason), is_postponed=True)
        if transfer.arriving:
            return self._end_load(transfer, outcome)
        return self._hold_again(transfer, outcome, now)

    def _hold_again(self, transfer: IncomingTransfer, outcome: Failed, now: float) -> list[Effect]:
        """Returns to HOLDING after a postponed load, and repeats Hold. The load keeps its deadline."""
        transfer.hold_again()
        self._waits.resume_load(transfer.key, now)
        return [*self._ask(transfer, now), outcome]

    def _can_load(self, transfer: IncomingTransfer) -> list[Effect]:
        """Reports once that a postponed load may start again."""
        if not transfer.awaits_can_load:
            return []
        transfer.awaits_can_load = False
        return [CanLoad(transfer.rank_transfer)]

    def _forget(self, transfer: IncomingTransfer) -> None:
        self._transfers.remove(transfer)
        self._waits.end(transfer.key)
