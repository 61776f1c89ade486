"""Whole workers' transfer endpoints, with real pools of bytes, joined by queues in one thread on virtual time."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

import numpy as np

from baton.clock import VirtualClock
from baton.config import KVTransferConfig
from baton.kv import KVFingerprint, WorkerRef
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from baton.worker import KVPeerCounts
from kv_transfer.commands import ImmediateCommand, KVConnectorMetadata, LoadBlocks, SendBlocks
from kv_transfer.connector.endpoint import TransferEndpoint, make_endpoint
from kv_transfer.connector.ranks import RankedConnector
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.pool import DeviceBlocks, DeviceKVBytes, KVBytes, KVPool
from kv_transfer.protocol.effects import Peer
from kv_transfer.protocol.transports import CUDA_IPC, SHARED_MEMORY, TransportOffer
from kv_transfer.transport.base import Arrival, Bytes, PoolReader
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader
from tests.factories.fake_cuda import FakeDriver, FakeHost

NUM_LAYERS, NUM_HEADS, CELL_BYTES, NUM_BLOCKS = 2, 8, 3, 16
FINGERPRINT = KVFingerprint(2, "model", "uint8", "LKHTD", NUM_LAYERS, NUM_HEADS, CELL_BYTES, 16, 1)
TOKEN = FirstToken(7, None)
LEASE_S, LOAD_TIMEOUT_S = 2.0, 8.0
CONFIG = KVTransferConfig(
    lease_s=LEASE_S, peer_timeout_s=2.0, load_timeout_s=LOAD_TIMEOUT_S, checksum="on", max_inflight_mib=1
)
KV_PHTB = np.random.default_rng(0).integers(
    1, 256, (NUM_LAYERS * 2, NUM_HEADS, 512, CELL_BYTES), dtype=np.uint8
)
"""The KV of one long prompt, as a worker without ranks and blocks would hold it."""


class QueueChannel:
    """Frames go to the fabric; those of the arrival at hand are read here."""

    def __init__(self, fabric: "Fabric", address: str) -> None:
        self._fabric = fabric
        self.address = address
        self.num_dropped = 0
        self.payload: list[bytes] = []

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> bool:
        target = peer.decode() if isinstance(peer, bytes) else peer
        frames = [header, *(span.tobytes() for span in payload)]
        self._fabric.post(self.address, target, isinstance(peer, bytes), frames)
        return True

    def read_payload(self) -> Iterator[Bytes]:
        return (np.frombuffer(span, np.uint8) for span in self.payload)


class EndpointConnector:
    """One rank's connector without a thread."""

    def __init__(self, endpoint: TransferEndpoint, counters: "Counter[str]") -> None:
        self._endpoint = endpoint
        self._counters = counters

    def send_commands(self, metadata: KVConnectorMetadata | None) -> None:
        for command in metadata.at_once if metadata else ():
            self._endpoint.execute(command)

    def start_load_kv(self, metadata: KVConnectorMetadata | None) -> None:
        for command in metadata.loads if metadata else ():
            self._endpoint.execute(command)

    def save_kv_blocks(self, metadata: KVConnectorMetadata | None, lost: Set[str]) -> None:
        for command in metadata.after if metadata else ():
            assert command.request_id not in lost
            self._endpoint.execute(command)

    def get_finished(self) -> KVConnectorOutput:
        return self._endpoint.collect_news()

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def peers(self) -> tuple[KVPeerCounts, ...]:
        return self._endpoint.metrics.snapshot()

    def shutdown(self) -> None:
        self._endpoint.close()


class Worker:
    """All ranks of one worker. Block i of a prompt lives in block 1 + i of every rank's pool."""

    def __init__(
        self, fabric: "Fabric", name: str, num_ranks: int, block_size: int, fingerprint: KVFingerprint
    ) -> None:
        addresses = tuple(f"{name}/{rank}" for rank in range(num_ranks))
        self.ref = WorkerRef(name, f"{name}-life", addresses, block_size)
        self.blocks: list[Bytes] = []
        """Of every rank, [num_blocks, bytes of a block], wherever they are."""
        connectors = []
        fingerprint = replace(fingerprint, block_size=block_size, num_ranks=num_ranks)
        for rank, address in enumerate(addresses):
            block_nbytes = NUM_LAYERS * 2 * NUM_HEADS // num_ranks * block_size * CELL_BYTES
            blocks, pool, readers = fabric.make_pool(block_nbytes, fingerprint, rank)
            pools = {name: reader.describe() or b"" for name, reader in readers.items()}
            offer = TransportOffer("host", fabric.transports, pools)
            counters: Counter[str] = Counter()
            endpoint = make_endpoint(
                CONFIG,
                self.ref.incarnation,
                fingerprint,
                pool,
                fabric.channel(address),
                readers,
                offer,
                counters,
                fabric.clock,
            )
            fabric.endpoints[address] = endpoint
            self.blocks.append(blocks)
            connectors.append(EndpointConnector(endpoint, counters))
        self.connector = RankedConnector(connectors)

    def command(self, *commands: ImmediateCommand) -> None:
        self.connector.send_commands(KVConnectorMetadata(commands, (), ()))

    def load(self, command: LoadBlocks) -> None:
        self.connector.start_load_kv(KVConnectorMetadata((), (command,), ()))

    def save(self, command: SendBlocks) -> None:
        self.connector.save_kv_blocks(KVConnectorMetadata((), (), (command,)), set())

    def news(self) -> KVConnectorOutput:
        return self.connector.get_finished()

    def blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(1, 1 + -(-num_tokens // self.ref.block_size)))

    def compute(self, num_tokens: int) -> None:
        """Every rank fills the blocks of the prompt's first tokens with its share of the KV."""
        for rank, blocks in enumerate(self.blocks):
            for index, block_id in enumerate(self.blocks_for(num_tokens)):
                blocks[block_id] = self._truth(rank, index).reshape(-1)

    def holds(self, num_tokens: int) -> bool:
        """Whether every rank has its share of the KV of the prompt's first tokens."""
        return all(self._num_held(rank, num_tokens) == num_tokens for rank in range(len(self.blocks)))

    def _num_held(self, rank: int, num_tokens: int) -> int:
        size, num_held = self.ref.block_size, 0
        for index, block_id in enumerate(self.blocks_for(num_tokens)):
            truth = self._truth(rank, index)
            num_wanted = min(size, num_tokens - index * size)
            held = self.blocks[rank][block_id].reshape(truth.shape)
            num_held += num_wanted * bool((held[:, :, :num_wanted] == truth[:, :, :num_wanted]).all())
        return num_held

    def _truth(self, rank: int, index: int) -> Bytes:
        num_heads = NUM_HEADS // len(self.blocks)
        heads = slice(rank * num_heads, (rank + 1) * num_heads)
        tokens = slice(index * self.ref.block_size, (index + 1) * self.ref.block_size)
        return np.ascontiguousarray(KV_PHTB[:, heads, tokens])


class Fabric:
    """The network, and the only clock."""

    def __init__(
        self, transport: str, *fallbacks: str, on_device: bool = False, began_at: float = 0.0
    ) -> None:
        """Every worker offers `transport`, and then the `fallbacks`. `began_at` is what the clock reads at first."""
        self.transport = transport
        self.transports = (transport, *fallbacks)
        self._host = FakeHost() if on_device or transport == CUDA_IPC else None
        self.clock = VirtualClock(began_at)
        self.endpoints: dict[str, TransferEndpoint] = {}
        self.drivers: list[FakeDriver] = []
        """Of every rank on a device, in the order in which they were added."""
        self.lose: Callable[[str, bytes], bool] = lambda _address, _header: False
        """Whether a frame to this address is lost."""
        self.sent: list[tuple[str, bytes]] = []
        """Every header that was sent, as it was encoded, and where to; lost ones too."""
        self.num_payloads_to_lose = 0
        """So many of the next headers arrive without the bytes that follow them."""
        self.alter: Callable[[str, bytes], bytes] = lambda _address, header: header
        """What becomes of a header that this address has sent."""
        self._channels: dict[str, QueueChannel] = {}
        self._queue: deque[tuple[str, str, bool, list[bytes]]] = deque()

    def add(
        self,
        name: str,
        num_ranks: int = 1,
        block_size: int = 16,
        fingerprint: KVFingerprint = FINGERPRINT,
    ) -> Worker:
        """`fingerprint`: its ranks and block size are those of the other arguments."""
        return Worker(self, name, num_ranks, block_size, fingerprint)

    def make_pool(
        self, block_nbytes: int, fingerprint: KVFingerprint, rank: int
    ) -> tuple[Bytes, KVPool, dict[str, PoolReader]]:
        """A rank's pool as an array and as endpoints see it, and the readers that go with it."""
        num_bytes, shape = NUM_BLOCKS * block_nbytes, (NUM_BLOCKS, block_nbytes)
        if self._host is not None:
            self.drivers.append(FakeDriver(self._host))
            device = CudaMemory(num_bytes, 0, self.drivers[-1])
            on_device = np.frombuffer(self._host.memories[device.address], np.uint8).reshape(shape)
            pool = DeviceKVBytes(DeviceBlocks(device, block_nbytes), fingerprint, rank)
            return on_device, pool, {CUDA_IPC: CudaIpcReader(device)} if self.transport == CUDA_IPC else {}
        memory = SharedMemory(num_bytes)
        blocks = memory.array.reshape(shape)
        readers: dict[str, PoolReader] = {}
        if self.transport == SHARED_MEMORY:
            readers[SHARED_MEMORY] = SharedMemoryReader(blocks, memory)
        return blocks, KVBytes(blocks, fingerprint, rank), readers

    def channel(self, address: str) -> QueueChannel:
        self._channels[address] = QueueChannel(self, address)
        return self._channels[address]

    def cut(self, address: str) -> None:
        """Nothing reaches this address."""
        self.lose = lambda target, _: target == address

    def mend(self) -> None:
        self.lose = lambda _address, _header: False

    def post(self, source: str, target: str, is_from_producer: bool, frames: list[bytes]) -> None:
        self.sent.append((target, frames[0]))
        if len(frames) > 1 and self.num_payloads_to_lose:
            self.num_payloads_to_lose -= 1
            frames = frames[:1]
        if not self.lose(target, frames[0]):
            header, *payload = frames
            self._queue.append((source, target, is_from_producer, [self.alter(source, header), *payload]))

    def deliver(self) -> None:
        """Everything under way, and what that leads to."""
        while self._queue:
            source, target, is_from_producer, (header, *payload) = self._queue.popleft()
            self._channels[target].payload = payload
            peer: Peer = source if is_from_producer else source.encode()
            self.endpoints[target].take(Arrival(peer, is_from_producer, header))

    def advance(self, seconds: float) -> None:
        """Time passes, from deadline to deadline."""
        end = self.clock.now() + seconds
        while True:
            self.deliver()
            times = [when for e in self.endpoints.values() if (when := e.next_deadline()) is not None]
            when = min([*times, end])
            self.clock.advance(max(0.0, when - self.clock.now()))
            for endpoint in self.endpoints.values():
                endpoint.on_time()
            if when >= end:
                break
        self.deliver()

    def assert_at_rest(self) -> None:
        """No endpoint knows of any hand-over, and once pools that were read are let go, nothing is due."""
        for endpoint in self.endpoints.values():
            endpoint.check_integrity()
        assert [len(endpoint) for endpoint in self.endpoints.values()] == [0] * len(self.endpoints)
        self.advance(60.0)
        assert [endpoint.next_deadline() for endpoint in self.endpoints.values()] == [None] * len(
            self.endpoints
        )
