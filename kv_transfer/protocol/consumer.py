"""Consumer: every hand-over this worker takes, as one sans-IO state machine; knows no socket, thread or clock.

    HOLDING ----- load -----> LOADING ----- all verified, End -----> (gone: Received)
       |                         |
       |  Refused, Aborted,      +-- Refused, Aborted, silence, deadline, bad blocks --> (gone: Failed)
       v  silence                +-- abort ----------------------------------------> (gone: Quiesced)
     LOST -------- load ---------------------------------------------------------> (gone: Failed)

HOLDING: our scheduler has no room yet; the producer is asked to keep what it computes. LOADING: blocks are reserved and
may be written. LOST: there will be no blocks, which the scheduler learns when it asks. HOLDING and LOST also end by
abort.

Hold and Open are repeated at a fixed pace while nothing arrives. A producer that answers nothing for `peer_timeout_s`
is dead, and a load that takes longer than `load_timeout_s` has failed. What belongs to no live transfer is counted.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv import KVFingerprint
from kv_transfer.protocol.effects import Effect, Failed, Quiesced, Received, Send
from kv_transfer.protocol.messages import (
    Aborted,
    Ack,
    Block,
    Cancel,
    End,
    Hold,
    Open,
    Opened,
    Refused,
    Release,
    ToConsumer,
    TransferKey,
)
from kv_transfer.protocol.timers import Timers

MAX_BAD_BLOCKS = 16
"""A transfer with more blocks than this that fail verification is given up: the path is broken."""


class State(Enum):
    HOLDING = auto()
    LOADING = auto()
    LOST = auto()


MOVES = {
    State.HOLDING: {State.LOADING, State.LOST},
    State.LOADING: set[State](),
    State.LOST: set[State](),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Why there will be no more blocks."""

    reason: str
    is_cancelled: bool = False
    is_producers_word: bool = False
    """The producer said so itself and has forgotten the transfer."""


@dataclass(slots=True, eq=False)
class Incoming:
    """One hand-over as its taker sees it."""

    key: TransferKey
    address: str
    request_id: str
    num_prompt_tokens: int
    state: State = State.HOLDING
    first_block: int = 0
    block_ids: tuple[int, ...] = ()
    """Where block `first_block + i` of the prompt goes."""
    verified: set[int] = field(default_factory=set)
    num_bad: int = 0
    end: End | None = None
    loss: Loss | None = None
    opened_at: float = 0.0
    first_block_at: float | None = None

    def move_to(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.key}: {self.state.name} -> {state.name}"
        self.state = state

    @property
    def num_valid_blocks(self) -> int:
        """Length of the verified run from the load's first block on."""
        index = self.first_block
        while index in self.verified:
            index += 1
        return index - self.first_block


class Consumer:
    """Feed it orders, messages, blocks and the time; do what it returns."""

    def __init__(
        self,
        fingerprint: KVFingerprint,
        heartbeat_s: float,
        peer_timeout_s: float,
        load_timeout_s: float,
        with_checksums: bool,
        counters: Counter[str],
    ) -> None:
        self._fingerprint = fingerprint
        self._with_checksums = with_checksums
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._load_timeout_s = load_timeout_s
        self._counters = counters
        self._transfers: dict[TransferKey, Incoming] = {}
        self._keys: dict[str, TransferKey] = {}
        self._last_heard: dict[str, float] = {}
        """When each producer, by incarnation, last said anything about any transfer."""
        self._beats: Timers[TransferKey] = Timers()
        self._deadlines: Timers[TransferKey] = Timers()

    # orders of this worker's engine

    def begin(
        self, request_id: str, key: TransferKey, address: str, num_prompt_tokens: int, now: float
    ) -> list[Effect]:
        """The engine took the request; until it has room, the producer is asked to hold.

        A second claim to one key is never served.
        """
        if key in self._transfers:
            self._counters["kv_duplicate_messages"] += 1
            return []
        transfer = Incoming(key, address, request_id, num_prompt_tokens)
        self._transfers[key] = transfer
        self._keys[request_id] = key
        self._last_heard.setdefault(key.producer, now)
        return self._beat(transfer, now)

    def load(self, request_id: str, first_block: int, block_ids: tuple[int, ...], now: float) -> list[Effect]:
        """Blocks are reserved: from now on they may be written, until Received, Failed or Quiesced."""
        if request_id not in self._keys:
            return [Failed(request_id, 0, "another request has claimed this transfer", False)]
        transfer = self._transfers[self._keys[request_id]]
        transfer.first_block, transfer.block_ids = first_block, block_ids
        if transfer.loss is not None:
            return self._fail(transfer, transfer.loss)
        transfer.move_to(State.LOADING)
        transfer.opened_at = now
        self._deadlines.set(transfer.key, now + self._load_timeout_s)
        return self._beat(transfer, now)

    def abort(self, request_id: str, reason: str) -> list[Effect]:
        """The request ended here; the producer is told. If the load ended a moment ago, that news stands."""
        if request_id not in self._keys:
            return []
        transfer = self._transfers[self._keys[request_id]]
        was_loading = transfer.state is State.LOADING
        self._forget(transfer)
        told = Send(transfer.address, Cancel(transfer.key, reason))
        return [told, Quiesced(request_id)] if was_loading else [told]

    # what peers and time bring

    def on_message(self, message: ToConsumer, now: float) -> list[Effect]:
        """Everything but `Block`, which comes with a payload and so through `destination` and `on_block`."""
        transfer = self._transfers.get(message.key)
        if transfer is None or transfer.state is State.LOST:
            self._counters["kv_late_messages"] += 1
            return []
        self._last_heard[message.key.producer] = now
        match message:
            case Opened():
                return []
            case Refused(reason=reason):
                return self._lose(
                    transfer, Loss(f"the prefill worker refused: {reason}", is_producers_word=True)
                )
            case Aborted(reason=reason, is_cancelled=is_cancelled):
                return self._lose(transfer, Loss(reason, is_cancelled, is_producers_word=True))
            case End():
                return self._on_end(transfer, message, now)
            case Block():
                raise AssertionError("a Block comes with its payload: use destination() and on_block()")

    def destination(self, header: Block) -> int | None:
        """The local block that the payload belongs in, or None if it is late, doubled or foreign."""
        transfer = self._transfers.get(header.key)
        if transfer is None or transfer.state is not State.LOADING:
            self._counters["kv_late_messages"] += 1
            return None
        if header.index in transfer.verified or not self._is_wanted(transfer, header.index):
            self._counters["kv_duplicate_messages"] += 1
            return None
        return transfer.block_ids[header.index - transfer.first_block]

    def on_block(self, header: Block, is_valid: bool, now: float) -> list[Effect]:
        """The payload is in the block that `destination` named, and its checksum was compared."""
        transfer = self._transfers[header.key]
        self._last_heard[header.key.producer] = now
        if transfer.first_block_at is None:
            transfer.first_block_at = now
        self._beats.set(transfer.key, now + self._heartbeat_s)
        ack = Send(transfer.address, Ack(header.key, header.index, is_valid))
        if is_valid:
            transfer.verified.add(header.index)
            return [ack, *self._complete(transfer, now)]
        self._counters["kv_checksum_failures"] += 1
        transfer.num_bad += 1
        if transfer.num_bad > MAX_BAD_BLOCKS:
            return self._lose(transfer, Loss(f"{transfer.num_bad} blocks arrived damaged"))
        return [ack]

    def on_time(self, now: float) -> list[Effect]:
        """Repeats what was not answered, and gives up what took too long."""
        effects: list[Effect] = []
        for key in list(self._deadlines.pop_due(now)):
            transfer = self._transfers[key]
            effects += self._lose(
                transfer, Loss(f"the prompt did not arrive within {self._load_timeout_s:g} s")
            )
        for key in list(self._beats.pop_due(now)):
            transfer = self._transfers[key]
            silent_s = now - self._last_heard[key.producer]
            if silent_s > self._peer_timeout_s:
                effects += self._lose(transfer, Loss(f"the prefill worker was silent for {silent_s:.1f} s"))
            else:
                effects += self._beat(transfer, now)
        return effects

    def next_deadline(self) -> float | None:
        times = [when for when in (self._beats.next(), self._deadlines.next()) if when is not None]
        return min(times, default=None)

    def __len__(self) -> int:
        return len(self._transfers)

    def _beat(self, transfer: Incoming, now: float) -> list[Effect]:
        """Hold, or Open with what arrived so far: asks again for everything that did not."""
        self._beats.set(transfer.key, now + self._heartbeat_s)
        if transfer.state is State.HOLDING:
            return [Send(transfer.address, Hold(transfer.key))]
        message = Open(
            transfer.key,
            self._fingerprint,
            transfer.num_prompt_tokens,
            transfer.first_block,
            tuple(sorted(transfer.verified)),
            self._with_checksums,
        )
        return [Send(transfer.address, message)]

    def _is_wanted(self, transfer: Incoming, index: int) -> bool:
        return 0 <= index - transfer.first_block < len(transfer.block_ids)

    def _on_end(self, transfer: Incoming, message: End, now: float) -> list[Effect]:
        if transfer.state is not State.LOADING:
            self._counters["kv_late_messages"] += 1
            return []
        if message.num_blocks != transfer.first_block + len(transfer.block_ids):
            reason = f"{message.num_blocks} blocks were sent, {len(transfer.block_ids)} expected"
            return self._lose(transfer, Loss(reason))
        transfer.end = message
        return self._complete(transfer, now)

    def _complete(self, transfer: Incoming, now: float) -> list[Effect]:
        if transfer.end is None or len(transfer.verified) < len(transfer.block_ids):
            return []
        self._forget(transfer)
        self._counters["kv_loads_received"] += 1
        return [
            Send(transfer.address, Release(transfer.key)),
            Received(
                transfer.request_id,
                transfer.end.first_token,
                len(transfer.block_ids),
                now - transfer.opened_at,
                now - (transfer.first_block_at if transfer.first_block_at is not None else now),
            ),
        ]

    def _lose(self, transfer: Incoming, loss: Loss) -> list[Effect]:
        """There will be no more blocks: fails the load, or remembers that there is nothing to load."""
        if transfer.state is State.LOADING:
            return self._fail(transfer, loss)
        transfer.loss = loss
        transfer.move_to(State.LOST)
        self._beats.cancel(transfer.key)
        return []

    def _fail(self, transfer: Incoming, loss: Loss) -> list[Effect]:
        self._forget(transfer)
        self._counters["kv_loads_failed"] += 1
        failed = Failed(transfer.request_id, transfer.num_valid_blocks, loss.reason, loss.is_cancelled)
        if loss.is_producers_word:
            return [failed]
        return [Send(transfer.address, Cancel(transfer.key, loss.reason)), failed]

    def _forget(self, transfer: Incoming) -> None:
        del self._transfers[transfer.key]
        del self._keys[transfer.request_id]
        if all(key.producer != transfer.key.producer for key in self._transfers):
            del self._last_heard[transfer.key.producer]
        self._beats.cancel(transfer.key)
        self._deadlines.cancel(transfer.key)
