"""Both ends of a hand-over as sans-IO protocols, joined by a queue, in one thread on virtual time."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.clock import VirtualClock
from baton.kv import KVFingerprint
from baton.request import FirstToken
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.effects import (
    Effect,
    Notification,
    OpenPool,
    RankTransfer,
    Send,
    SendPieces,
    Unwanted,
)
from kv_transfer.protocol.geometry import PieceShape, RankLayout
from kv_transfer.protocol.incoming import ConsumerIdentity, WantedPieces
from kv_transfer.protocol.messages import ChecksumPolicy, Pieces, ToConsumer, ToProducer, TransferKey
from kv_transfer.protocol.outgoing import BYTES_PER_TURN, ProducerIdentity
from kv_transfer.protocol.producer import Producer
from kv_transfer.protocol.transports import SENDS_BYTES, SHARED_MEMORY, ZMQ_TCP, TransportOffer

FINGERPRINT = KVFingerprint(2, "model", "float32", "LKHTD", 2, 2, 8, 16, 1)
SHAPE = PieceShape(pieces_per_block=1, num_tokens=16, first_head=0, num_heads=2)
PIECE_NBYTES = BYTES_PER_TURN
"""So large that every piece is sent in its own turn."""
FIRST_TOKEN = FirstToken(7, None)
LEASE_S = 10.0
HEARTBEAT_S = 1.0
PEER_TIMEOUT_S = 4.0
LOAD_TIMEOUT_S = 60.0
ADDRESS = "producer"
"""The producer's address."""


def make_key(
    transfer_id: str = "t", attempt: int = 0, producer: str = "p-1", consumer: str = "d-1"
) -> TransferKey:
    return TransferKey(transfer_id, attempt, producer, consumer)


KEY = make_key()
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Frame:
    """A message in flight, with the bytes of its block if it has any."""

    source: str
    message: ToProducer | ToConsumer
    payload: tuple[int, ...] = ()


Tamper = Callable[[Frame], list[Frame]]
"""Returns the frames that arrive for a frame sent: the frame itself, none for a loss, two for a duplicate."""


def honest(frame: Frame) -> list[Frame]:
    return [frame]


class Wire:
    """A producer and a consumer, joined by a queue that a test may change. Block contents are plain numbers.

    With `transport` SHARED_MEMORY, the consumer reads the producer's blocks at once; or when `finish_reads` is
    called, if a test sets `reads_at_once` to False.
    """

    def __init__(
        self,
        tamper: Tamper = honest,
        *,
        window_blocks: int = 4,
        transport: str = ZMQ_TCP,
        checksums: ChecksumPolicy = ChecksumPolicy.ON,
        consumer_fingerprint: KVFingerprint = FINGERPRINT,
    ) -> None:
        self.clock = VirtualClock()
        self.tamper = tamper
        self.producer_counters: Counter[str] = Counter()
        self.consumer_counters: Counter[str] = Counter()
        transports = (SHARED_MEMORY, ZMQ_TCP) if transport == SHARED_MEMORY else (ZMQ_TCP,)
        identity = ProducerIdentity(
            "p-1", FINGERPRINT, RankLayout(16), TransportOffer("host", transports, {SHARED_MEMORY: b"pool"})
        )
        self.producer = Producer(identity, LEASE_S, window_blocks * PIECE_NBYTES, self.producer_counters)
        self.consumer = Consumer(
            ConsumerIdentity(
                consumer_fingerprint,
                TransportOffer("host", transports),
                checksums,
                HEARTBEAT_S,
                PEER_TIMEOUT_S,
                LOAD_TIMEOUT_S,
            ),
            self.consumer_counters,
        )
        self.source_blocks: dict[int, int] = {}
        self.target_blocks: dict[int, int] = {}
        self.in_flight: deque[tuple[str, Frame]] = deque()
        self.sent: list[Frame] = []
        self.notifications: list[Notification] = []
        self.unwanted: list[RankTransfer] = []
        self.opened_pools: list[OpenPool] = []
        self.reads: list[WantedPieces] = []
        self.reads_at_once = True

    def do(self, effects: list[Effect], source: str) -> None:
        """Carries out the effects of one end."""
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._post(str(peer), Frame(source, message))
                case SendPieces(peer, key, version, indices, piece_ids):
                    contents = tuple(self.source_blocks[piece_id] for piece_id in piece_ids)
                    header = Pieces(key, version, indices, piece_ids, checksums=contents)
                    self._post(str(peer), Frame(source, header, contents if effect.has_payload else ()))
                case OpenPool():
                    self.opened_pools.append(effect)
                case Unwanted(rank_transfer):
                    self.unwanted.append(rank_transfer)
                case notification:
                    self.notifications.append(notification)

    def at_producer(self, effects: list[Effect]) -> None:
        self.do(effects, ADDRESS)

    def at_consumer(self, effects: list[Effect]) -> None:
        self.do(effects, "consumer")

    def deliver(self, limit: int = 100_000) -> None:
        """Delivers everything in flight, and all messages that follow from it, without passing time."""
        while self.in_flight and limit:
            limit -= 1
            self._arrive(*self.in_flight.popleft())
        assert limit, "the two ends never stop sending"

    def advance(self, seconds: float) -> None:
        """Advances the time from deadline to deadline, and delivers at each."""
        end = self.clock.now() + seconds
        while True:
            self.deliver()
            times = [
                t for t in (self.producer.next_deadline(), self.consumer.next_deadline()) if t is not None
            ]
            when = min(times, default=end)
            if when > end:
                break
            self.clock.advance(max(0.0, when - self.clock.now()))
            self.at_producer(self.producer.on_time(self.clock.now()))
            self.at_consumer(self.consumer.on_time(self.clock.now()))
            if when == end:
                break
        self.clock.advance(max(0.0, end - self.clock.now()))
        self.deliver()

    # commands of both engines, for one prompt of whole blocks

    def begin_send(self, key: TransferKey, num_tokens: int, request_id: str = "r") -> None:
        self.at_producer(self.producer.begin(RankTransfer(request_id), key, num_tokens, SHAPE, PIECE_NBYTES))

    def ready(self, first_index: int, num_blocks: int, request_id: str = "r") -> None:
        """Reports that blocks from `first_index` on are computed.

        Block i of the prompt is in local block 100 + i.
        """
        block_ids = [100 + index for index in range(first_index, first_index + num_blocks)]
        for block_id in block_ids:
            self.source_blocks[block_id] = block_id * 1_000
        self.at_producer(self.producer.blocks_ready(RankTransfer(request_id), first_index, block_ids))

    def finish_send(self, request_id: str = "r") -> None:
        self.at_producer(self.producer.finish(RankTransfer(request_id), FIRST_TOKEN, self.clock.now()))

    def begin_load(self, key: TransferKey, num_tokens: int, request_id: str = "r") -> None:
        self.at_consumer(
            self.consumer.begin(RankTransfer(request_id), key, ADDRESS, num_tokens, SHAPE, self.clock.now())
        )

    def load(self, first_block: int, num_blocks: int, request_id: str = "r") -> None:
        """Loads a prompt. Block i of the prompt goes to local block 200 + i."""
        block_ids = tuple(200 + index for index in range(first_block, first_block + num_blocks))
        self.at_consumer(
            self.consumer.load(RankTransfer(request_id), first_block * 16, block_ids, self.clock.now())
        )

    def finish_reads(self) -> None:
        """Completes every read under way: copies what is in the producer's blocks now."""
        reads, self.reads = self.reads, []
        for wanted in reads:
            piece_ids = wanted.message.piece_ids
            self._write(wanted, [self.source_blocks[piece_ids[position]] for position in wanted.positions])

    def received_blocks(self) -> dict[int, int]:
        """The contents of received blocks, by block index of the prompt."""
        return {block_id - 200: content for block_id, content in self.target_blocks.items()}

    def assert_at_rest(self) -> None:
        assert len(self.producer) == len(self.consumer) == 0
        self.producer.check_integrity()
        assert self.producer.next_deadline() is self.consumer.next_deadline() is None
        assert not self.consumer._waits._due_at, "deadlines of loads that have ended"

    def _post(self, target: str, frame: Frame) -> None:
        self.sent.append(frame)
        self.in_flight.extend((target, survivor) for survivor in self.tamper(frame))

    def _arrive(self, target: str, frame: Frame) -> None:
        now = self.clock.now()
        if target == ADDRESS:
            self.at_producer(self.producer.on_message(b"consumer", frame.message, now))  # type: ignore[arg-type]
        elif not isinstance(frame.message, Pieces):
            self.at_consumer(self.consumer.on_message(frame.message, now))  # type: ignore[arg-type]
        elif wanted := self.consumer.wanted(frame.message, now):
            if wanted.transport in SENDS_BYTES:
                self._write(wanted, [frame.payload[position] for position in wanted.positions])
                return
            self.reads.append(wanted)
            if self.reads_at_once:
                self.finish_reads()

    def _write(self, wanted: WantedPieces, contents: list[int]) -> None:
        damaged: list[int] = []
        columns = zip(wanted.positions, wanted.indices, wanted.piece_ids, contents, strict=True)
        for position, index, piece_id, content in columns:
            self.target_blocks[piece_id] = content
            if wanted.has_checksums and content != wanted.message.checksums[position]:
                damaged.append(index)
        self.at_consumer(self.consumer.on_arrived(wanted, damaged, self.clock.now()))


def start(wire: Wire, num_blocks: int = 3) -> None:
    """Begins a prompt of `num_blocks` full blocks at both ends. The consumer has room for it."""
    wire.begin_send(KEY, num_blocks * 16)
    wire.begin_load(KEY, num_blocks * 16)
    wire.load(0, num_blocks)
    wire.deliver()


def sent(wire: Wire, kind: type[M]) -> list[M]:
    """All messages of this kind that either end sent, including lost messages."""
    return [frame.message for frame in wire.sent if isinstance(frame.message, kind)]


def lossy(seed: int, *, loss: float = 0.1, doubling: float = 0.1, damage: float = 0.05) -> Tamper:
    """A network that randomly loses, duplicates and damages frames."""
    rng = random.Random(seed)

    def tamper(frame: Frame) -> list[Frame]:
        if rng.random() < loss:
            return []
        if frame.payload and rng.random() < damage:
            frame = Frame(frame.source, frame.message, tuple(content + 1 for content in frame.payload))
        return [frame, frame] if rng.random() < doubling else [frame]

    return tamper
