"""KVConnectorWorker: the half of the connector that moves bytes, as the engine calls it around each step."""

from collections import Counter
from collections.abc import Callable, Set

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.curve import PlaneKeys
from baton.kv import KVFingerprint
from baton.step import KVConnectorOutput
from kv_transfer.agent import COUNTERS, TransferAgent
from kv_transfer.orders import KVConnectorMetadata
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.producer import Producer
from kv_transfer.transport.zmq_tcp import Bytes, ZmqTcp

HEARTBEATS_PER_LEASE = 4


class KVConnectorWorker:
    """One per process, for both roles: which end a request is on is the request's matter.

    No call blocks or raises for what a peer did. `on_news` is called from the transfer thread whenever `get_finished`
    has something to say.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        bind_host: str,
        keys: PlaneKeys | None,
        incarnation: str,
        clock: Clock,
        blocks: Bytes,
        fingerprint: KVFingerprint,
        on_news: Callable[[], None],
    ) -> None:
        """`blocks` is the pool as bytes, uint8 [num_blocks, block_nbytes]; it is read and written in place."""
        block_nbytes = blocks.shape[1]
        self._transport = ZmqTcp(bind_host, block_nbytes, keys)
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        window_blocks = config.max_inflight_mib * 2**20 // block_nbytes
        heartbeat_s = min(config.lease_s, config.peer_timeout_s) / HEARTBEATS_PER_LEASE
        self._agent = TransferAgent(
            incarnation,
            blocks,
            self._transport,
            Producer(incarnation, fingerprint, config.lease_s, window_blocks, self._counters),
            Consumer(
                fingerprint,
                heartbeat_s,
                config.peer_timeout_s,
                config.load_timeout_s,
                config.checksum,
                self._counters,
            ),
            self._counters,
            clock,
            config.checksum,
            on_news,
        )
        self.kv_address = self._transport.address

    def start(self) -> None:
        self._agent.start()

    def send_orders(self, metadata: KVConnectorMetadata | None) -> None:
        """As soon as a step is planned: what to announce, to hand over, to give up.

        Returns at once, unless blocks are taken back: then when nothing reads them any more.
        """
        if metadata is not None and metadata.at_once:
            self._agent.post(metadata.at_once)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        """When every step before the planned one is computed: nothing writes the blocks that are to be loaded."""
        if metadata is not None and metadata.loads:
            self._agent.post(metadata.loads)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, lost: Set[str]) -> None:
        """When the step is computed: the blocks it filled may leave, but not those of `lost` requests."""
        if metadata is not None:
            filled = tuple(order for order in metadata.after if order.request_id not in lost)
            if filled:
                self._agent.post(filled)

    def get_finished(self) -> KVConnectorOutput:
        """What ended since the last call."""
        return self._agent.take_news()

    def counters(self) -> dict[str, int]:
        """Monotonic counts since the start; safe from any thread."""
        return {
            **self._counters,
            "kv_dropped_frames": self._transport.num_dropped,
            "kv_denied_peers": self._transport.num_denied,
        }

    def shutdown(self) -> None:
        self._agent.stop()
