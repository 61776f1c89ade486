"""TransferAgent: the thread that drives the hand-over protocol over a transport; knows no scheduler and no request.

Orders come in through a queue, news go out through another. Between the two stand the state machines, the clock, and
the blocks themselves. Asleep, it wakes for an order, a message or a deadline, and for nothing else.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import xxhash

from baton.clock import Clock
from baton.errors import WireError
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from baton.wakeup import WakeUp
from kv_transfer.orders import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    LoadBlocks,
    OrderAtOnce,
    SendBlocks,
    WithdrawBlocks,
)
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.effects import Effect, Failed, Freed, Quiesced, Received, Send, SendBlock
from kv_transfer.protocol.messages import TO_CONSUMER, TO_PRODUCER, Block, TransferKey
from kv_transfer.protocol.producer import Producer
from kv_transfer.transport.zmq_tcp import Arrival, Bytes, ZmqTcp

logger = logging.getLogger(__name__)

COUNTERS = (
    "kv_sends_started",
    "kv_sends_done",
    "kv_sends_aborted",
    "kv_sends_cancelled",
    "kv_sends_refused",
    "kv_loads_received",
    "kv_loads_failed",
    "kv_bytes_sent",
    "kv_bytes_received",
    "kv_blocks_resent",
    "kv_checksum_failures",
    "kv_lease_expiries",
    "kv_late_messages",
    "kv_duplicate_messages",
    "kv_foreign_messages",
    "kv_bad_messages",
)
"""Every counter exists from the start, so that other threads may copy them while they grow."""

TURN_TIMEOUT_S = 5.0
"""A turn of the agent's loop takes milliseconds; one that takes this long will not end."""

Order = OrderAtOnce | LoadBlocks | SendBlocks


class TransferAgent:
    """`post` and `take_news` are for the engine's thread; everything else happens on the agent's own."""

    def __init__(
        self,
        incarnation: str,
        blocks: Bytes,
        transport: ZmqTcp,
        producer: Producer,
        consumer: Consumer,
        counters: "Counter[str]",
        clock: Clock,
        checksum: bool,
        on_news: Callable[[], None],
    ) -> None:
        self._incarnation = incarnation
        self._blocks = blocks
        self._transport = transport
        self._producer = producer
        self._consumer = consumer
        self._counters = counters
        self._clock = clock
        self._checksum = checksum
        self._on_news = on_news
        self._orders: queue.SimpleQueue[tuple[tuple[Order, ...], threading.Event]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Freed | Received | Failed | Quiesced] = queue.SimpleQueue()
        self._wakeup = WakeUp()
        self._transport.wake_on(self._wakeup)
        self._is_stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes every socket; transfers under way end by their deadlines elsewhere."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def post(self, orders: tuple[Order, ...]) -> None:
        """Gives orders. Returns at once, unless one takes blocks back: then when nothing reads them any more."""
        done = threading.Event()
        self._orders.put((orders, done))
        self._wakeup.set()
        if any(isinstance(order, WithdrawBlocks) for order in orders):
            self._check_taken_back(done)
        self._check_alive()

    def take_news(self) -> KVConnectorOutput:
        """Everything that happened since the last call; raises if the agent's thread has died."""
        self._check_alive()
        sent, quiet = [], []
        received, failed = [], []
        while not self._news.empty():
            match self._news.get():
                case Freed(request_id=request_id):
                    sent.append(request_id)
                case Quiesced(request_id=request_id):
                    quiet.append(request_id)
                case Received() as load:
                    num_bytes = load.num_blocks * self._blocks.shape[1]
                    received.append(
                        ReceivedKV(
                            load.request_id, load.first_token, num_bytes, load.elapsed_s, load.moving_s
                        )
                    )
                case Failed() as load:
                    failed.append(
                        FailedKV(load.request_id, load.num_valid_blocks, load.reason, load.is_cancelled)
                    )
        return KVConnectorOutput(tuple(sent), tuple(received), tuple(failed), tuple(quiet))

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                for arrival in self._transport.wait(self._seconds_to_deadline()):
                    self._do(self._take(arrival))
                self._wakeup.clear()
                self._take_orders()
                now = self._clock.now()
                self._do(self._producer.on_time(now))
                self._do(self._consumer.on_time(now))
        except Exception as error:  # the edge of the thread: the engine must not go on as if it were there
            logger.exception("the transfer thread ended")
            self._failure = error
            self._on_news()
        finally:
            self._transport.close()

    def _check_taken_back(self, done: threading.Event) -> None:
        """The step that follows writes these blocks, so without an answer it must not run."""
        if not done.wait(TURN_TIMEOUT_S) and self._failure is None:
            raise RuntimeError(f"the transfer thread did not give blocks back within {TURN_TIMEOUT_S:g} s")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the transfer thread has died") from self._failure

    def _seconds_to_deadline(self) -> float | None:
        times = [self._producer.next_deadline(), self._consumer.next_deadline()]
        when = min((time for time in times if time is not None), default=None)
        return None if when is None else max(0.0, when - self._clock.now())

    def _take_orders(self) -> None:
        while not self._orders.empty():
            orders, done = self._orders.get()
            for order in orders:
                self._do(self._obey(order))
            done.set()

    def _obey(self, order: Order) -> list[Effect]:
        now = self._clock.now()
        match order:
            case BeginSend(request_id, transfer, num_prompt_tokens):
                key = TransferKey(
                    transfer.transfer_id, transfer.attempt, self._incarnation, transfer.peer.incarnation
                )
                return self._producer.begin(request_id, key, num_prompt_tokens)
            case SendBlocks(request_id, first_index, block_ids):
                return self._producer.blocks_ready(request_id, first_index, block_ids)
            case WithdrawBlocks(request_id):
                return self._producer.withdraw(request_id)
            case FinishSend(request_id, num_blocks, tail, first_token):
                ready = self._producer.blocks_ready(request_id, num_blocks - len(tail), tail)
                return ready + self._producer.finish(request_id, num_blocks, first_token, now)
            case AbortSend(request_id, reason, is_cancelled, is_held):
                effects = self._producer.abort(request_id, reason, is_cancelled)
                return effects if is_held else [e for e in effects if not isinstance(e, Freed)]
            case BeginLoad(request_id, transfer, num_prompt_tokens):
                key = TransferKey(
                    transfer.transfer_id, transfer.attempt, transfer.peer.incarnation, self._incarnation
                )
                return self._consumer.begin(request_id, key, transfer.peer.kv_address, num_prompt_tokens, now)
            case LoadBlocks(request_id, first_index, block_ids):
                return self._consumer.load(request_id, first_index, block_ids, now)
            case AbortLoad(request_id, reason):
                return self._consumer.abort(request_id, reason)

    def _take(self, arrival: Arrival) -> list[Effect]:
        """One message from a peer; whatever is wrong with it is counted and goes no further."""
        try:
            if not arrival.is_from_producer:
                return self._producer.on_message(
                    arrival.peer, TO_PRODUCER.decode(arrival.header), self._clock.now()
                )
            message = TO_CONSUMER.decode(arrival.header)
        except WireError as error:
            self._counters["kv_bad_messages"] += 1
            logger.warning("dropped a message on the KV plane: %s", error)
            return []
        if isinstance(message, Block):
            return self._take_block(message, arrival)
        return self._consumer.on_message(message, self._clock.now())

    def _take_block(self, header: Block, arrival: Arrival) -> list[Effect]:
        block_id = self._consumer.destination(header)
        if block_id is None or not arrival.has_payload:
            return []
        block = self._blocks[block_id]
        is_valid = self._transport.read_payload(block)
        if self._checksum and is_valid:
            is_valid = (
                xxhash.xxh3_64_intdigest(block) == header.checksum
            )  # a missing one does not match either
        self._counters["kv_bytes_received"] += block.nbytes
        return self._consumer.on_block(header, is_valid, self._clock.now())

    def _do(self, effects: Iterable[Effect]) -> None:
        has_news = False
        for effect in effects:
            match effect:
                case Send(peer, message):
                    codec = TO_PRODUCER if isinstance(peer, str) else TO_CONSUMER
                    self._transport.send(peer, codec.encode(message))  # type: ignore[arg-type]
                case SendBlock():
                    self._send_block(effect)
                case Freed() | Received() | Failed() | Quiesced():
                    self._news.put(effect)
                    has_news = True
        if has_news:
            self._on_news()

    def _send_block(self, effect: SendBlock) -> None:
        block = self._blocks[effect.block_id]
        checksum = xxhash.xxh3_64_intdigest(block) if effect.with_checksum else None
        self._transport.send(
            effect.peer, TO_CONSUMER.encode(Block(effect.key, effect.index, checksum)), block
        )
        self._counters["kv_bytes_sent"] += block.nbytes
