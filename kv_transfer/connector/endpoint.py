"""TransferEndpoint: one rank's end of all its worker's hand-overs; knows no thread and no scheduler.

Its driver, a thread or a simulator, passes in commands, arrivals and times one after another, and takes the output:

    commands, arrivals, time --> producer/endpoint.py --> protocol/producer.py --> channel
                               consumer/endpoint.py --> protocol/consumer.py --> channel, readers
"""

import logging
from collections import Counter
from collections.abc import Mapping

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.errors import WireError
from baton.step import KVConnectorOutput
from kv_transfer.consumer.endpoint import ConsumerCommand, ConsumerEndpoint
from kv_transfer.pool import RankPool
from kv_transfer.producer.endpoint import ProducerCommand, ProducerEndpoint
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.incoming import ConsumerIdentity
from kv_transfer.protocol.messages import (
    TO_CONSUMER,
    TO_PRODUCER,
    ChecksumPolicy,
    DamagedFrame,
    OtherVersion,
    Unreadable,
)
from kv_transfer.protocol.outgoing import ProducerIdentity
from kv_transfer.protocol.producer import Producer
from kv_transfer.protocol.transports import TransportOffer
from kv_transfer.records import PeerMetrics
from kv_transfer.transport.base import Arrival, Channel, PoolReader

logger = logging.getLogger(__name__)

COUNTERS = (
    "kv_sends_started",
    "kv_sends_done",
    "kv_sends_aborted",
    "kv_sends_cancelled",
    "kv_sends_refused",
    "kv_loads_started",
    "kv_loads_received",
    "kv_loads_failed",
    "kv_loads_aborted",
    "kv_loads_not_needed",
    "kv_loads_postponed",
    "kv_bytes_sent",
    "kv_bytes_received",
    "kv_pieces_resent",
    "kv_checksum_failures",
    "kv_lease_expiries",
    "kv_late_messages",
    "kv_duplicate_messages",
    "kv_foreign_messages",
    "kv_bad_messages",
    "kv_unreadable_messages",
    "kv_version_mismatches",
    "kv_unreachable_pools",
)
"""All counters exist from the start, so other threads may copy the dict of counters while values change."""

TransferCommand = ProducerCommand | ConsumerCommand


class TransferEndpoint:
    """The producer end and the consumer end of this rank; passes each message to one of them."""

    def __init__(
        self,
        producer_end: ProducerEndpoint,
        consumer_end: ConsumerEndpoint,
        channel: Channel,
        counters: "Counter[str]",
        metrics: PeerMetrics,
    ) -> None:
        self._producer_end = producer_end
        self._consumer_end = consumer_end
        self._channel = channel
        self.counters = counters
        self.metrics = metrics

    def execute(self, command: TransferCommand, issued_at: float | None = None) -> None:
        """Carries out one command of the engine. `issued_at`: when the engine issued it; None: now. Hand-overs count
        their times from there."""
        if isinstance(command, ConsumerCommand):
            self._consumer_end.execute(command, issued_at)
        else:
            self._producer_end.execute(command, issued_at)

    def on_arrival(self, arrival: Arrival) -> None:
        """Handles a peer's message. Counts and drops a bad message; if it is a consumer's, answers `Unreadable`."""
        try:
            if arrival.is_from_producer:
                self._consumer_end.on_message(arrival.peer, TO_CONSUMER.decode(arrival.header))
            else:
                self._producer_end.on_message(arrival.peer, TO_PRODUCER.decode(arrival.header))
        except WireError as error:
            self.counters["kv_bad_messages"] += 1
            self.counters["kv_version_mismatches"] += isinstance(error, OtherVersion)
            self._report(error)
            if not arrival.is_from_producer:
                unreadable = Unreadable(str(error), isinstance(error, DamagedFrame))
                self._channel.send(arrival.peer, TO_CONSUMER.encode(unreadable))
            elif isinstance(error, OtherVersion):
                self._consumer_end.on_other_protocol(arrival.peer, str(error))

    def on_gone(self, address: str) -> None:
        """Call it if nothing listens at this producer's address any more, for example because its process has ended.
        Loads from it then fail."""
        self._consumer_end.on_gone(address)

    def _report(self, error: WireError) -> None:
        """Logs the 1st, 2nd, 4th, 8th ... bad message, so that endless bad messages do not fill the log."""
        num_bad = self.counters["kv_bad_messages"]
        if num_bad.bit_count() == 1:
            logger.warning("dropped a KV-plane message (%d so far): %s", num_bad, error)

    def fileno(self) -> int:
        """A file descriptor that is readable while `on_time` has something to do before `next_deadline`."""
        return self._consumer_end.fileno()

    def on_time(self) -> None:
        """Does the work that is due. Call it after every wake-up, and at `next_deadline`."""
        self._producer_end.on_time()
        self._consumer_end.on_time()

    def next_deadline(self) -> float | None:
        times = [self._producer_end.next_deadline(), self._consumer_end.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def collect_output(self) -> KVConnectorOutput:
        """The output since the last call."""
        output = self._producer_end.output + self._consumer_end.output
        self._producer_end.output = self._consumer_end.output = KVConnectorOutput()
        return output

    def close(self) -> None:
        self._producer_end.close()
        self._consumer_end.close()

    def check_integrity(self) -> None:
        """Asserts that counters and current transfers are consistent; cheap enough for an idle moment."""
        self._producer_end.check_integrity()
        self._consumer_end.check_integrity()

    def __len__(self) -> int:
        """Number of unfinished hand-overs."""
        return len(self._producer_end) + len(self._consumer_end)


def make_endpoint(
    config: KVTransferConfig,
    incarnation: str,
    pool: RankPool,
    channel: Channel,
    readers: Mapping[str, PoolReader],
    offer: TransportOffer,
    clock: Clock,
) -> TransferEndpoint:
    """Makes an endpoint from `config`. `offer` lists the names of `readers`, and of `channel` if it may carry KV."""
    counters = Counter(dict.fromkeys(COUNTERS, 0))
    producer = Producer(
        ProducerIdentity(incarnation, pool.fingerprint, pool.layout, offer),
        config.lease_s,
        config.max_inflight_mib * 2**20,
        counters,
    )
    consumer = Consumer(
        ConsumerIdentity(
            pool.fingerprint,
            offer,
            ChecksumPolicy(config.checksum),
            config.heartbeat_s,
            config.peer_timeout_s,
            config.load_timeout_s,
        ),
        counters,
    )
    metrics = PeerMetrics()
    producer_end = ProducerEndpoint(incarnation, pool, channel, producer, counters, metrics, clock)
    consumer_end = ConsumerEndpoint(incarnation, pool, channel, readers, consumer, counters, metrics, clock)
    return TransferEndpoint(producer_end, consumer_end, channel, counters, metrics)
