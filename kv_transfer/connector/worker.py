"""KVConnectorWorker: the half of the connector that moves bytes, as the engine calls it around each step."""

from collections import Counter
from collections.abc import Callable, Set

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.kv import KVFingerprint
from baton.step import KVConnectorOutput
from baton.system.curve import PlaneKeys
from baton.worker import KVPeerCounts
from kv_transfer.commands import KVConnectorMetadata
from kv_transfer.connector.agent import TransferAgent
from kv_transfer.connector.endpoint import COUNTERS, make_endpoint
from kv_transfer.pool import DeviceBlocks, make_pool
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.choice import make_offer, make_readers
from kv_transfer.transport.shared_memory import SharedMemory
from kv_transfer.transport.zmq_tcp import IDLE_S, ZmqChannel


class KVConnectorWorker:
    """One per rank, for both roles; each request says which end it is on.

    No call blocks, or raises because of a peer. `on_kv_output` is called, on the transfer thread, whenever
    `get_finished` has output.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        bind_host: str,
        keys: PlaneKeys | None,
        incarnation: str,
        clock: Clock,
        blocks: Bytes | DeviceBlocks,
        fingerprint: KVFingerprint,
        on_kv_output: Callable[[], None],
        *,
        rank: int = 0,
        memory: SharedMemory | None = None,
        advertise_host: str | None = None,
    ) -> None:
        """`blocks` is the rank's pool, read and written in place: uint8 [num_blocks, block_nbytes], or on a device.

        `memory` is the memory of blocks on the host, if other processes may map it.
        """
        pool = make_pool(blocks, fingerprint, rank)
        self._channel = ZmqChannel(
            bind_host,
            pool.block_nbytes,
            keys,
            clock,
            advertise_host,
            max_queued_bytes=2 * config.max_inflight_mib * 2**20,
            idle_s=max(IDLE_S, config.peer_timeout_s),  # heartbeats are more frequent than peer_timeout_s
        )
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        readers = make_readers(config, blocks, memory, clock)
        endpoint = make_endpoint(
            config,
            incarnation,
            fingerprint,
            pool,
            self._channel,
            {reader.name: reader for reader in readers},
            make_offer(config, readers),
            self._counters,
            clock,
        )
        self._metrics = endpoint.metrics
        self._agent = TransferAgent(endpoint, self._channel, clock, on_kv_output)
        self.kv_address = self._channel.address
        self.progress = self._agent.progress
        """That of the transfer thread."""

    def start(self) -> None:
        self._agent.start()

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        """As soon as a step is planned: what to announce, hand over or give up.

        Returns at once, unless blocks are withdrawn: then once none of them is offered any more.
        """
        if metadata is not None and metadata.at_once:
            self._agent.post(metadata.at_once)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        """When every step before the planned one is computed: no step writes the blocks to be loaded any more."""
        if metadata is not None and metadata.loads:
            self._agent.post(metadata.loads)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, lost: Set[str]) -> None:
        """When the step is computed: the blocks it filled may leave, but not those of `lost` requests."""
        if metadata is not None:
            filled = tuple(command for command in metadata.after if command.request_id not in lost)
            if filled:
                self._agent.post(filled)

    def get_finished(self) -> KVConnectorOutput:
        """What ended since the last call."""
        return self._agent.collect_output()

    def counters(self) -> dict[str, int]:
        """Monotonic counts since the start; safe from any thread."""
        return {
            **self._counters,
            "kv_dropped_frames": self._channel.num_dropped,
            "kv_denied_peers": self._channel.num_denied,
            "kv_disconnections": self._channel.num_disconnections,
        }

    def peers(self) -> tuple[KVPeerCounts, ...]:
        """Hand-overs by peer since the start; safe from any thread."""
        return self._metrics.snapshot()

    def shutdown(self) -> None:
        self._agent.stop()
