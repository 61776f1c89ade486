"""Producer: every hand-over this worker gives, as one sans-IO state machine; knows no socket, thread or clock.

    EARLY ----- begin -----> PREPARING ----- Open -----> STREAMING ----- Release, lease over -----> (gone, blocks freed)
      |                          |                           |
      +--------------------------+----- Cancel, refused -----+--> CANCELLED -- finish, abort --> (gone, blocks freed)

EARLY: the consumer spoke first. PREPARING: blocks become ready, nobody reads them yet. STREAMING: they are sent as they
become ready, within a window of unacknowledged blocks per peer, in which transfers take turns. CANCELLED: the consumer
wants no more, but our own engine does not know yet.

A lease runs from the prefill's end on, and begins anew with every sign of the consumer's life; while the prompt is
being computed, the request's own deadline applies. EARLY lasts one lease at most. How a hand-over ended is remembered
for a while, and told to a consumer that asks late. What comes for another incarnation is refused.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv import KVFingerprint
from baton.request import FirstToken
from kv_transfer.protocol.effects import Effect, Freed, Peer, Send, SendBlock
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
from kv_transfer.protocol.timers import Timers

MAX_EARLY = 1024
"""Hand-overs that a consumer may announce before this worker's engine has heard of them."""

MAX_ENDED = 4096
"""Hand-overs whose end is remembered."""


class State(Enum):
    EARLY = auto()
    PREPARING = auto()
    STREAMING = auto()
    CANCELLED = auto()


MOVES = {
    State.EARLY: {State.PREPARING, State.CANCELLED},
    State.PREPARING: {State.STREAMING, State.CANCELLED},
    State.STREAMING: {State.CANCELLED},
    State.CANCELLED: set[State](),
}


@dataclass(slots=True, eq=False)
class Outgoing:
    """One hand-over as its giver sees it."""

    key: TransferKey
    state: State
    request_id: str | None = None
    """None until our own engine has heard of it."""
    num_prompt_tokens: int = 0
    peer: Peer = b""
    first_block: int = 0
    with_checksums: bool = True
    open: Open | None = None
    """An Open that came early."""
    ready: dict[int, int] = field(default_factory=dict)
    """Prompt block index -> local block id, for blocks that are computed."""
    unsent: deque[int] = field(default_factory=deque)
    unacked: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    first_token: FirstToken | None = None
    """Set when the prefill is complete; the lease runs from then on."""
    num_blocks: int = 0
    is_end_sent: bool = False

    def move_to(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.key}: {self.state.name} -> {state.name}"
        self.state = state


class Producer:
    """Feed it orders, messages and the time; do what it returns."""

    def __init__(
        self,
        incarnation: str,
        fingerprint: KVFingerprint,
        lease_s: float,
        window_blocks: int,
        counters: Counter[str],
    ) -> None:
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._window_blocks = max(1, window_blocks)
        self._counters = counters
        self._transfers: dict[TransferKey, Outgoing] = {}
        self._keys: dict[str, TransferKey] = {}
        self._num_early = 0
        self._inflight: Counter[Peer] = Counter()
        self._turns: deque[Outgoing] = deque()
        """Streaming transfers with blocks to send, in round-robin order."""
        self._leases: Timers[TransferKey] = Timers()
        self._farewells: dict[TransferKey, Aborted] = {}
        """The latest ends that a consumer may not have heard of."""

    # orders of this worker's engine

    def begin(self, request_id: str, key: TransferKey, num_prompt_tokens: int) -> list[Effect]:
        """The engine took the request; its prompt will be computed. A second claim to one key is never served."""
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = Outgoing(key, State.PREPARING)
        else:
            if transfer.request_id is not None:
                self._counters["kv_duplicate_messages"] += 1
                return []
            self._num_early -= 1
            self._leases.cancel(key)
            if transfer.state is State.EARLY:
                transfer.move_to(State.PREPARING)
        transfer.request_id, transfer.num_prompt_tokens = request_id, num_prompt_tokens
        self._keys[request_id] = key
        self._counters["kv_sends_started"] += 1
        if transfer.state is State.PREPARING and transfer.open is not None:
            return self._open(transfer, transfer.open, transfer.peer)
        return []

    def blocks_ready(self, request_id: str, first_index: int, block_ids: Iterable[int]) -> list[Effect]:
        """These blocks are computed and will not change until `Freed`."""
        transfer = self._of(request_id)
        if transfer is None or transfer.state is State.CANCELLED:
            return []
        for index, block_id in enumerate(block_ids, first_index):
            transfer.ready[index] = block_id
            if index >= transfer.first_block and index not in transfer.acked:
                transfer.unsent.append(index)
        return self._pump(transfer)

    def withdraw(self, request_id: str) -> list[Effect]:
        """The request was preempted: after this returns, none of its blocks is read until it is ready again."""
        transfer = self._of(request_id)
        if transfer is None:
            return []
        transfer.ready.clear()
        transfer.unsent.clear()
        self._release_window(transfer)
        return self._pump()

    def finish(self, request_id: str, num_blocks: int, first_token: FirstToken, now: float) -> list[Effect]:
        """The prefill is complete: the lease begins, and ends with `Freed`."""
        transfer = self._of(request_id)
        if transfer is None:
            return [Freed(request_id)]
        if transfer.state is State.CANCELLED:
            return self._forget(transfer)
        transfer.first_token, transfer.num_blocks = first_token, num_blocks
        self._leases.set(transfer.key, now + self._lease_s)
        return self._pump(transfer)

    def abort(self, request_id: str, reason: str, is_cancelled: bool) -> list[Effect]:
        """The request ended otherwise: tells the consumer, and frees; see `Aborted` for `is_cancelled`."""
        transfer = self._of(request_id)
        if transfer is None:
            return [Freed(request_id)]
        told: list[Effect] = []
        if transfer.peer and transfer.state is not State.CANCELLED:
            told = [Send(transfer.peer, Aborted(transfer.key, reason, is_cancelled))]
        self._counters["kv_sends_aborted"] += 1
        self._remember(Aborted(transfer.key, reason, is_cancelled))
        return told + self._forget(transfer)

    # what peers and time bring

    def on_message(self, peer: Peer, message: ToProducer, now: float) -> list[Effect]:
        key = message.key
        if key.producer != self._incarnation:
            self._counters["kv_foreign_messages"] += 1
            return [Send(peer, Refused(key, "this worker was restarted since; the blocks are gone"))]
        transfer = self._transfers.get(key)
        if transfer is None:
            return self._on_unknown(peer, message, now)
        if transfer.first_token is not None:
            self._leases.set(key, now + self._lease_s)
        if transfer.state is State.CANCELLED:
            self._counters["kv_late_messages"] += 1
            return []
        match message:
            case Hold():
                transfer.peer = peer
                return [Send(peer, Opened(key))]
            case Open():
                return self._open(transfer, message, peer)
            case Ack():
                return self._on_ack(transfer, message)
            case Release():
                self._counters["kv_sends_done"] += 1
                return self._close(transfer)
            case Cancel():
                self._counters["kv_sends_cancelled"] += 1
                return self._close(transfer)

    def on_time(self, now: float) -> list[Effect]:
        """Ends the leases whose time has come, and tells the consumers, in case they live after all."""
        effects: list[Effect] = []
        for key in list(self._leases.pop_due(now)):
            transfer = self._transfers[key]
            reason = f"nothing was heard of the decode worker for {self._lease_s:g} s"
            if transfer.request_id is None:
                reason = "the prefill worker was not asked for this prompt"
            self._counters["kv_lease_expiries"] += 1
            farewell = Aborted(key, reason, is_cancelled=False)
            self._remember(farewell)
            if transfer.peer:
                effects.append(Send(transfer.peer, farewell))
            effects += self._forget(transfer)
        return effects

    def next_deadline(self) -> float | None:
        return self._leases.next()

    def __len__(self) -> int:
        return len(self._transfers)

    def _of(self, request_id: str) -> Outgoing | None:
        """The hand-over of a request; None if another request had claimed its key before."""
        key = self._keys.get(request_id)
        return None if key is None else self._transfers[key]

    def _on_unknown(self, peer: Peer, message: ToProducer, now: float) -> list[Effect]:
        """News of a hand-over that is over, or that our own engine has not announced yet."""
        key = message.key
        if isinstance(message, Open | Hold) and key in self._farewells:
            return [Send(peer, self._farewells[key])]
        if not isinstance(message, Open | Hold | Cancel) or key in self._farewells:
            self._counters["kv_late_messages"] += 1
            return []
        if self._num_early >= MAX_EARLY:
            return [Send(peer, Refused(key, f"{MAX_EARLY} hand-overs are announced already"))]
        early = Outgoing(key, State.EARLY, peer=peer)
        self._transfers[key] = early
        self._num_early += 1
        self._leases.set(key, now + self._lease_s)
        if isinstance(message, Cancel):
            early.move_to(State.CANCELLED)
            return []
        early.open = message if isinstance(message, Open) else None
        return [Send(peer, Opened(key))]

    def _open(self, transfer: Outgoing, message: Open, peer: Peer) -> list[Effect]:
        """The consumer has room. Repeated, it says what arrived so far, and everything else is sent again."""
        if transfer.state is State.EARLY:
            transfer.peer, transfer.open = peer, message
            return [Send(peer, Opened(transfer.key))]
        if reason := self._mismatch(transfer, message):
            self._counters["kv_sends_refused"] += 1
            return [Send(peer, Refused(transfer.key, reason)), *self._close(transfer)]
        if transfer.state is State.PREPARING:
            transfer.move_to(State.STREAMING)
        self._release_window(transfer)
        transfer.peer, transfer.with_checksums = peer, message.with_checksums
        transfer.first_block = message.first_block
        transfer.acked = set(message.received)
        transfer.is_end_sent = False
        missing = set(transfer.ready) - transfer.acked
        transfer.unsent = deque(sorted(index for index in missing if index >= message.first_block))
        return [Send(peer, Opened(transfer.key)), *self._pump(transfer)]

    def _mismatch(self, transfer: Outgoing, message: Open) -> str | None:
        if differences := self._fingerprint.differences(message.fingerprint):
            return "the workers do not match: " + "; ".join(differences)
        if message.num_prompt_tokens != transfer.num_prompt_tokens:
            return f"the prompts differ: {transfer.num_prompt_tokens} != {message.num_prompt_tokens} tokens"
        return None

    def _on_ack(self, transfer: Outgoing, message: Ack) -> list[Effect]:
        if message.index not in transfer.unacked:
            self._counters["kv_duplicate_messages"] += 1
            return []
        transfer.unacked.remove(message.index)
        self._inflight[transfer.peer] -= 1
        if message.is_valid:
            transfer.acked.add(message.index)
        elif message.index in transfer.ready:
            self._counters["kv_blocks_resent"] += 1
            transfer.unsent.append(message.index)
        return self._pump(transfer)

    def _pump(self, transfer: Outgoing | None = None) -> list[Effect]:
        """Sends what the peers' windows allow, one block of each transfer in turn; `transfer` has news."""
        if transfer is not None and transfer.state is State.STREAMING and transfer not in self._turns:
            self._turns.append(transfer)
        effects: list[Effect] = []
        stalled: list[Outgoing] = []
        while self._turns:
            turn = self._turns.popleft()
            if not turn.unsent:
                effects += self._end(turn)
            elif self._inflight[turn.peer] >= self._window_blocks:
                stalled.append(turn)
            else:
                index = turn.unsent.popleft()
                turn.unacked.add(index)
                self._inflight[turn.peer] += 1
                effects.append(SendBlock(turn.peer, turn.key, index, turn.ready[index], turn.with_checksums))
                self._turns.append(turn)
        self._turns.extend(stalled)
        return effects

    def _end(self, transfer: Outgoing) -> list[Effect]:
        """Everything ready was sent; if that was all there will be, says so once."""
        if transfer.first_token is None or transfer.is_end_sent:
            return []
        transfer.is_end_sent = True
        return [Send(transfer.peer, End(transfer.key, transfer.num_blocks, transfer.first_token))]

    def _close(self, transfer: Outgoing) -> list[Effect]:
        """The consumer is done with it. If our engine still computes for it, the blocks stay until it hears."""
        if transfer.first_token is not None:
            return self._forget(transfer)
        transfer.move_to(State.CANCELLED)
        return self._leave_turns(transfer)

    def _forget(self, transfer: Outgoing) -> list[Effect]:
        """Drops every trace, and frees the blocks if an engine holds any for it."""
        del self._transfers[transfer.key]
        self._leases.cancel(transfer.key)
        effects = self._leave_turns(transfer)
        if transfer.request_id is None:
            self._num_early -= 1
            return effects
        del self._keys[transfer.request_id]
        return [*effects, Freed(transfer.request_id)]

    def _remember(self, farewell: Aborted) -> None:
        self._farewells[farewell.key] = farewell
        if len(self._farewells) > MAX_ENDED:
            del self._farewells[next(iter(self._farewells))]

    def _leave_turns(self, transfer: Outgoing) -> list[Effect]:
        if transfer in self._turns:
            self._turns.remove(transfer)
        self._release_window(transfer)
        return self._pump()

    def _release_window(self, transfer: Outgoing) -> None:
        self._inflight[transfer.peer] -= len(transfer.unacked)
        if self._inflight[transfer.peer] <= 0:
            del self._inflight[transfer.peer]
        transfer.unacked.clear()
