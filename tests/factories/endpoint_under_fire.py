"""A live TransferEndpoint between an engine that keeps the rules and peers that break them.

After every event these hold: nothing was raised, every request of the engine gets exactly one end, and in the
pool only blocks that a load may write have changed.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.clock import VirtualClock
from baton.config import KVTransferConfig
from baton.errors import WireError
from baton.kv import KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    LoadBlocks,
    SendBlocks,
    WithdrawBlocks,
)
from kv_transfer.connector.endpoint import TransferCommand, make_endpoint
from kv_transfer.pool import KVBytes
from kv_transfer.protocol.effects import Peer
from kv_transfer.protocol.messages import (
    TO_CONSUMER,
    TO_PRODUCER,
    Aborted,
    Ack,
    Cancel,
    End,
    Open,
    Opened,
    Pieces,
    Refused,
    Release,
    ToConsumer,
    ToProducer,
    TransferKey,
    Unreadable,
)
from kv_transfer.transport.base import Arrival, host_id
from kv_transfer.transport.choice import make_offer, make_readers
from kv_transfer.transport.shared_memory import SharedMemory
from tests.factories.recording_channel import RecordingChannel
from tests.factories.wire_values import hostile_frame, integer, kinds_of, long_text, maker, odd_fingerprint

FINGERPRINT = KVFingerprint(2, "model", "float32", "LKHTD", 2, 2, 8, 16, 1)
BLOCK_NBYTES = 2 * 2 * 2 * 16 * 8 * 4
NUM_BLOCKS = 24
US = "us-1"
PEERS = ("peer-1", "peer-2")
CONFIG = KVTransferConfig(lease_s=5.0, peer_timeout_s=4.0, load_timeout_s=20.0, max_inflight_mib=1)
FINAL_MESSAGES = (Refused, Aborted, Cancel, Release, Unreadable)
RARELY = 0.06
"""Weight of messages that end a hand-over: such messages are rare."""

END_S = 200.0
"""Virtual seconds after which no hand-over may be left."""


@dataclass(slots=True)
class Sending:
    """A request that this worker prefills, from the view of its engine."""

    num_tokens: int
    num_ready: int = 0
    is_over: bool = False


@dataclass(slots=True)
class Loading:
    """A request whose prompt this worker waits for."""

    num_tokens: int
    block_ids: tuple[int, ...] = ()
    is_aborted: bool = False


class EndpointUnderFire:
    """Call `round` any number of times, then `end`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._clock = VirtualClock()
        memory, self._peers_memory = (
            SharedMemory(NUM_BLOCKS * BLOCK_NBYTES),
            SharedMemory(NUM_BLOCKS * BLOCK_NBYTES),
        )
        self._pool = memory.array.reshape(NUM_BLOCKS, BLOCK_NBYTES)
        self._pool[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
        self._expected = self._pool.copy()
        self._channel = RecordingChannel()
        transport = rng.choice(("auto", "zmq_tcp", "shared_memory"))
        config = CONFIG.with_values("test", transport=transport, checksum=rng.choice(("auto", "on", "off")))
        readers = make_readers(config, self._pool, memory, self._clock)
        self._peer_reach = make_offer(
            config, make_readers(config, self._pool, self._peers_memory, self._clock)
        )
        self.endpoint = make_endpoint(
            config,
            US,
            KVBytes(self._pool, FINGERPRINT),
            self._channel,
            {reader.name: reader for reader in readers},
            make_offer(config, readers),
            self._clock,
        )
        self._keys = {"unknown": TransferKey("unknown", 0, US, "peer-1")}
        self._sends: dict[str, Sending] = {}
        self._loads: dict[str, Loading] = {}
        self._num_requests = 0
        self.counts: Counter[str] = Counter()

    def round(self) -> None:
        """Runs one event of any kind."""
        self.counts["rounds"] += 1
        events = (self._lie, self._be_honest, self._command, self._garble, self._wait)
        event = self._rng.choices(events, (60, 10, 22, 6, 4))[0]
        event()
        self.endpoint.on_time()
        self._check()

    def end(self) -> None:
        """Ends some requests by the engine and the others by timeouts. Afterwards nothing may be left."""
        for request_id in list(self._sends):
            if not self._sends[request_id].is_over:
                self._rng.choice((self._finish_send, self._abort_send))(request_id)
        for request_id, load in list(self._loads.items()):
            if not load.block_ids or self._rng.random() < 0.3:
                self._abort_load(request_id)
        end = self._clock.now() + END_S
        while (when := self.endpoint.next_deadline()) is not None:
            assert when <= end, f"{len(self.endpoint)} hand-overs never end"
            self._clock.advance(max(0.0, when - self._clock.now()))
            self.endpoint.on_time()
            self._check()
        assert len(self.endpoint) == 0
        assert not self._sends, f"never freed: {self._sends}"
        assert not self._loads, f"never ended: {self._loads}"
        self.endpoint.close()

    # peers

    def _lie(self) -> None:
        """Takes a readable message of a peer. Most are plausible messages about an open hand-over."""
        is_from_producer = self._rng.random() < 0.5
        codec: Any = TO_CONSUMER if is_from_producer else TO_PRODUCER
        kinds = kinds_of(codec)
        kind = self._rng.choices(kinds, [RARELY if kind in FINAL_MESSAGES else 1.0 for kind in kinds])[0]
        try:
            message = self._message(kind, is_from_producer)
            frame = codec.encode(message)
        except WireError:  # too long to be sent
            return
        self._channel.payload.clear()
        if isinstance(message, Pieces):
            number = len(message.indices) + self._rng.choice((-1, 0, 0, 0, 1))
            sizes = [
                self._rng.choice((BLOCK_NBYTES,) * 9 + (0, 1, BLOCK_NBYTES + 1, 2 * BLOCK_NBYTES))
                for _ in range(max(0, number))
            ]
            self._channel.payload.extend(np.full(size, 0xEE, np.uint8) for size in sizes)
        self.counts[f"sent {kind.__name__}"] += 1
        self._take(is_from_producer, frame)

    def _be_honest(self) -> None:
        """Takes all messages that a load waits for. An earlier lie may have made them useless."""
        request_id = self._rng.choice([*self._loads, "unknown"])
        key = self._keys[request_id]
        num_pieces = -(-self._num_tokens(key) // 16)
        numbers = tuple(range(num_pieces))
        transport = self._rng.choice(("zmq_tcp", "shared_memory"))
        for message in (
            Opened(key, host_id(), transport, self._peer_reach.pools.get(transport, b"")),
            Pieces(key, 0, numbers, numbers, ()),
            End(key, 0, num_pieces, FirstToken(7, None)),
        ):
            self._channel.payload.append(np.full(num_pieces * BLOCK_NBYTES, 0xAA, np.uint8))
            self._take(True, TO_CONSUMER.encode(message))
            self._channel.payload.clear()

    def _message(self, kind: Any, is_from_producer: bool) -> ToProducer | ToConsumer:
        message: ToProducer | ToConsumer = maker(kind)(self._rng)
        if not isinstance(message, Unreadable) and self._rng.random() < 0.95:
            message = replace(message, key=self._key(is_from_producer))
        return self._made_plausible(message) if self._rng.random() < 0.8 else message

    def _garble(self) -> None:
        is_from_producer = self._rng.random() < 0.5
        self._take(
            is_from_producer, hostile_frame(TO_CONSUMER if is_from_producer else TO_PRODUCER, self._rng)
        )

    def _take(self, is_from_producer: bool, frame: bytes) -> None:
        peer: Peer = (
            f"tcp://{self._rng.choice(PEERS)}" if is_from_producer else self._rng.choice((b"a", b"b"))
        )
        self.endpoint.on_arrival(Arrival(peer, is_from_producer, frame))

    def _key(self, is_from_producer: bool) -> TransferKey:
        open_ones = [
            self._keys[request_id] for request_id in (self._loads if is_from_producer else self._sends)
        ]
        if not open_ones or self._rng.random() < 0.1:
            open_ones = [*self._keys.values(), *self._channel.seen]
        key = self._rng.choice(open_ones)
        if self._rng.random() < 0.05:
            return replace(key, attempt=integer(self._rng), producer_rank=integer(self._rng))
        if self._rng.random() < 0.01:
            return replace(key, transfer_id=long_text(self._rng))
        return key

    def _made_plausible(self, message: ToProducer | ToConsumer) -> ToProducer | ToConsumer:
        """Replaces most fields by values that an honest peer would send."""
        rng = self._rng
        match message:
            case Open():
                received = tuple(range(rng.choice((0, 0, 2, 50))))
                odd, renamed = odd_fingerprint(rng, FINGERPRINT), replace(FINGERPRINT, model=long_text(rng))
                wrong = rng.choice((message.fingerprint, renamed, odd))
                return replace(
                    message,
                    fingerprint=FINGERPRINT if rng.random() < 0.9 else wrong,
                    num_tokens=self._num_tokens(message.key),
                    first_piece=rng.choice((0, 0, 1, message.first_piece)),
                    received=received,
                    received_versions=tuple(rng.choice((0, 0, 1, -1)) for _ in received),
                    host=rng.choice((host_id(), host_id(), "elsewhere")),
                    transports=rng.choice((("zmq_tcp",), ("shared_memory", "zmq_tcp"), (long_text(rng),))),
                )
            case Opened():
                transport = rng.choice((None, "zmq_tcp", "shared_memory", "nixl"))
                pool = (
                    self._peer_reach.pools.get("shared_memory", b"") if rng.random() < 0.8 else message.pool
                )
                return replace(
                    message, host=rng.choice((host_id(), "elsewhere")), transport=transport, pool=pool
                )
            case Pieces():
                some = dict.fromkeys(rng.choice((-1, 0, 1, 2, 3, 4, 5, 6)) for _ in range(rng.randint(1, 6)))
                indices = tuple(some) if rng.random() < 0.5 else tuple(range(6))
                piece_ids = tuple(rng.randrange(NUM_BLOCKS) for _ in indices)
                if rng.random() < 0.3:
                    piece_ids = (wild_piece_id(rng), *piece_ids[1:])
                return Pieces(message.key, rng.choice((0, 0, 0, 1)), indices, piece_ids, ())
            case Ack():
                valid = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 4)))
                damaged = tuple(rng.randint(0, 7) for _ in range(rng.choice((0, 0, 2))))
                return replace(message, version=rng.choice((0, 0, 1)), valid=valid, damaged=damaged)
            case End():
                num_pieces = -(-self._num_tokens(message.key) // 16)
                return End(
                    message.key, rng.choice((0, 0, 1, message.version)), num_pieces, FirstToken(7, None)
                )
            case Cancel() | Refused() | Aborted():
                return replace(message, reason=long_text(rng) if rng.random() < 0.1 else message.reason)
            case other:
                return other

    def _num_tokens(self, key: TransferKey) -> int:
        request = self._sends.get(key.transfer_id) or self._loads.get(key.transfer_id)
        return request.num_tokens if request is not None else 16

    def _wait(self) -> None:
        self._clock.advance(self._rng.choice((0.1, 0.5, 1.0, 1.0, 2.0, 6.0)))

    # the engine

    def _command(self) -> None:
        sends = [request_id for request_id, sending in self._sends.items() if not sending.is_over]
        loads = [request_id for request_id, load in self._loads.items() if not load.is_aborted]
        act = self._rng.random()
        if act < 0.25 and len(self._sends) < 6:
            self._begin_send()
        elif act < 0.5 and len(self._loads) < 6:
            self._begin_load()
        elif act < 0.75 and sends:
            send = self._rng.choice(sends)
            acts = (self._fill, self._fill, self._fill, self._preempt, self._finish_send, self._abort_send)
            self._rng.choice(acts)(send)
        elif loads:
            load = self._rng.choice(loads)
            act_on = self._abort_load if self._rng.random() < 0.2 else self._load
            act_on(load)

    def _begin_send(self) -> None:
        request_id, transfer = self._new(TransferRole.PRODUCER)
        self._sends[request_id] = Sending(self._rng.choice((16, 40, 96)))
        self._execute(BeginSend(request_id, transfer, self._sends[request_id].num_tokens))

    def _fill(self, request_id: str) -> None:
        """Computes the next full block of the prompt, in any block of the pool."""
        sending = self._sends[request_id]
        if sending.num_ready < sending.num_tokens // 16:
            self._execute(SendBlocks(request_id, sending.num_ready, (self._rng.randrange(NUM_BLOCKS),)))
            sending.num_ready += 1

    def _preempt(self, request_id: str) -> None:
        self._sends[request_id].num_ready = 0
        self._execute(WithdrawBlocks(request_id))

    def _finish_send(self, request_id: str) -> None:
        sending = self._sends[request_id]
        while sending.num_ready < sending.num_tokens // 16:
            self._fill(request_id)
        sending.is_over = True
        tail = (self._rng.randrange(NUM_BLOCKS),) if sending.num_tokens % 16 else ()
        self._execute(FinishSend(request_id, -(-sending.num_tokens // 16), tail, FirstToken(7, None)))

    def _abort_send(self, request_id: str) -> None:
        self._sends[request_id].is_over = True
        is_held = self._rng.random() < 0.7
        if not is_held:
            del self._sends[request_id]
        self._execute(AbortSend(request_id, "over", self._rng.random() < 0.5, is_held))

    def _begin_load(self) -> None:
        request_id, transfer = self._new(TransferRole.CONSUMER)
        self._loads[request_id] = Loading(self._rng.choice((16, 40, 96)))
        self._execute(BeginLoad(request_id, transfer, self._loads[request_id].num_tokens))

    def _load(self, request_id: str) -> None:
        load = self._loads[request_id]
        num_blocks = -(-load.num_tokens // 16)
        taken = {block_id for other in self._loads.values() for block_id in other.block_ids}
        free = [block_id for block_id in range(NUM_BLOCKS) if block_id not in taken]
        if load.block_ids or len(free) < num_blocks:
            return
        load.block_ids = tuple(free[:num_blocks])
        first = self._rng.randrange(num_blocks)
        self._execute(LoadBlocks(request_id, first, load.block_ids[first:]))

    def _abort_load(self, request_id: str) -> None:
        load = self._loads[request_id]
        if load.block_ids:
            load.is_aborted = True
        else:
            del self._loads[request_id]
        self._execute(AbortLoad(request_id, "over"))

    def _new(self, role: TransferRole) -> tuple[str, KVTransferParams]:
        self._num_requests += 1
        request_id, peer = f"t{self._num_requests}", self._rng.choice(PEERS)
        producer, consumer = (US, peer) if role is TransferRole.PRODUCER else (peer, US)
        self._keys[request_id] = TransferKey(request_id, 0, producer, consumer)
        return request_id, KVTransferParams(
            role, request_id, 0, WorkerRef(peer, peer, (f"tcp://{peer}",), 16)
        )

    def _execute(self, command: TransferCommand) -> None:
        self.endpoint.execute(command)
        self._check()

    # what must hold

    def _check(self) -> None:
        news = self.endpoint.collect_output()
        for request_id in news.finished_sending:
            assert self._sends.pop(request_id).is_over, f"{request_id} was freed before its prefill ended"
        for received in news.finished_recving:
            self._end_load(received.request_id, is_aborted=False)
        for failed in news.failed_recving:
            load = self._end_load(failed.request_id, is_aborted=False)
            if failed.is_postponed:
                self._loads[failed.request_id] = Loading(load.num_tokens)
        for request_id in news.quiesced:
            self._end_load(request_id, is_aborted=True)
        for load in self._loads.values():
            self._expected[list(load.block_ids)] = self._pool[list(load.block_ids)]
        assert np.array_equal(self._pool, self._expected), "a write outside the blocks of loads"
        self.counts["received"] += len(news.finished_recving)
        self.counts["failed"] += len(news.failed_recving)
        self.counts["freed"] += len(news.finished_sending)

    def _end_load(self, request_id: str, is_aborted: bool) -> Loading:
        load = self._loads.pop(request_id)
        assert load.block_ids, f"{request_id} had not begun"
        assert load.is_aborted is is_aborted, f"{request_id} was {'not ' * is_aborted}aborted"
        self._expected[list(load.block_ids)] = self._pool[list(load.block_ids)]
        return load


def wild_piece_id(rng: random.Random) -> int:
    """A piece id beyond every pool. Its offset in bytes overflows, or nearly overflows."""
    if rng.random() < 0.5:
        return integer(rng)
    return rng.choice((2**63, 2**64)) // BLOCK_NBYTES + rng.choice((-1, -1, 0, 1))
