"""Transfer endpoints of whole workers, with real pools of bytes, in the simulator's world."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from baton.config import KVTransferConfig
from baton.kv import LATENT_LAYOUT, KVFingerprint, WorkerRef
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from kv_transfer.commands import ImmediateCommand, KVConnectorMetadata, LoadBlocks, SendBlocks
from kv_transfer.connector.ranks import RankedConnector
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.pool import DeviceBlocks, DeviceKVBytes, KVBytes, RankPool
from kv_transfer.protocol.transports import CUDA_IPC, SHARED_MEMORY
from kv_transfer.transport.base import Bytes, PoolReader
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader
from simulator.connector import SimConnector
from simulator.network import Network, NetworkFaults, Payload, SimChannel
from simulator.world import Process, World
from tests.factories.fake_cuda import FakeDriver, FakeHost

NUM_LAYERS, NUM_HEADS, CELL_BYTES, NUM_BLOCKS = 2, 8, 3, 16
FINGERPRINT = KVFingerprint(2, "model", "uint8", "LKHTD", NUM_LAYERS, NUM_HEADS, CELL_BYTES, 16, 1)
LATENTS = replace(FINGERPRINT, layout=LATENT_LAYOUT, num_kv_heads=1)
"""Of workers whose ranks all store the same bytes: whole latents."""
TOKEN = FirstToken(7, None)
LEASE_S, LOAD_TIMEOUT_S = 2.0, 8.0
CONFIG = KVTransferConfig(
    lease_s=LEASE_S, peer_timeout_s=3.5, load_timeout_s=LOAD_TIMEOUT_S, checksum="on", max_inflight_mib=1
)
KV_PHTB = np.random.default_rng(0).integers(
    1, 256, (NUM_LAYERS * 2, NUM_HEADS, 512, CELL_BYTES), dtype=np.uint8
)
"""The KV of one long prompt, before it is divided among ranks and blocks."""


class ScriptedNetwork(Network):
    """Carries messages at once, except as a test demands."""

    def __init__(self, world: World) -> None:
        super().__init__(world, NetworkFaults())
        self.lose: Callable[[str, bytes], bool] = lambda _address, _header: False
        """Decides whether a message to this address is lost."""
        self.alter: Callable[[str, bytes], bytes] = lambda _address, header: header
        """Changes a header sent from this address."""
        self.delay_s = 0.0
        self.num_payloads_to_lose = 0
        """How many of the next messages with bytes arrive without their bytes."""
        self.sent: list[tuple[str, bytes]] = []
        """Every header as it was encoded, with its destination. Lost messages are included."""

    def post(
        self, source: str, target: str, header: bytes, payload: Payload, arrive: Callable[..., None]
    ) -> None:
        sender, receiver = f"sim://{source}", f"sim://{target}"
        self.sent.append((receiver, header))
        if payload and self.num_payloads_to_lose:
            self.num_payloads_to_lose -= 1
            payload = Payload(())
        if not self.lose(receiver, header):
            self.world.after(self.delay_s, partial(arrive, self.alter(sender, header), payload))

    def cut(self, address: str) -> None:
        """Loses everything sent to this address."""
        self.lose = lambda target, _: target == address

    def mend(self) -> None:
        self.lose = lambda _address, _header: False


class Worker:
    """All ranks of one worker. Block i of a prompt is stored in block 1 + i of every rank's pool."""

    def __init__(
        self, fabric: "Fabric", name: str, num_ranks: int, block_size: int, fingerprint: KVFingerprint
    ) -> None:
        names = tuple(f"{name}/{rank}" for rank in range(num_ranks))
        self.ref = WorkerRef(
            name, f"{name}-incarnation", tuple(f"sim://{name}" for name in names), block_size
        )
        self.blocks: list[Bytes] = []
        """The pool of each rank, [num_blocks, bytes of a block], in host or device memory."""
        connectors = []
        fingerprint = replace(fingerprint, block_size=block_size, num_ranks=num_ranks)
        self._num_planes, heads = fingerprint.num_planes, fingerprint.num_divided_heads
        self._num_heads, self._is_divided = (heads or num_ranks) // num_ranks, heads is not None
        for rank, rank_name in enumerate(names):
            block_nbytes = self._num_planes * self._num_heads * block_size * CELL_BYTES
            blocks, pool, readers = fabric.make_pool(block_nbytes, fingerprint, rank)
            process = Process()
            process.incarnation = f"{rank_name}-incarnation"
            connector = SimConnector(fabric.world, process, fabric.clock, wake=lambda: None)
            channel = SimChannel(fabric.network, rank_name, process)
            connector.attach(
                CONFIG,
                self.ref.incarnation,
                pool,
                channel,
                readers,
                "host",
                fabric.transports,
            )
            self.blocks.append(blocks)
            connectors.append(connector)
        fabric.connectors += connectors
        self.connector = RankedConnector(connectors)

    def command(self, *commands: ImmediateCommand) -> None:
        self.connector.send_commands(KVConnectorMetadata(commands, (), ()))

    def load(self, command: LoadBlocks) -> None:
        self.connector.start_load_kv(KVConnectorMetadata((), (command,), ()))

    def save(self, command: SendBlocks) -> None:
        self.connector.save_kv_blocks(KVConnectorMetadata((), (), (command,)), set())

    def output(self) -> KVConnectorOutput:
        return self.connector.get_finished()

    def blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(1, 1 + -(-num_tokens // self.ref.block_size)))

    def compute(self, num_tokens: int) -> None:
        """Fills the blocks of the prompt's first tokens on every rank, with the rank's share of the KV."""
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
        first = rank * self._num_heads if self._is_divided else 0
        tokens = slice(index * self.ref.block_size, (index + 1) * self.ref.block_size)
        return np.ascontiguousarray(KV_PHTB[: self._num_planes, first : first + self._num_heads, tokens])


class Fabric:
    """Workers in one world, with one clock and one network."""

    def __init__(
        self, transport: str, *fallbacks: str, on_device: bool = False, began_at: float = 0.0
    ) -> None:
        """Every worker offers `transport`, and then the `fallbacks`. The clock starts at `began_at`."""
        self.transport = transport
        self.transports = (transport, *fallbacks)
        self._host = FakeHost() if on_device or transport == CUDA_IPC else None
        self.world = World(seed=0)
        self.clock = self.world.clock(began_at)
        self.network = ScriptedNetwork(self.world)
        self.connectors: list[SimConnector] = []
        """One connector for every rank."""
        self.drivers: list[FakeDriver] = []
        """The drivers of all ranks on devices, in the order in which they were added."""

    def add(
        self,
        name: str,
        num_ranks: int = 1,
        block_size: int = 16,
        fingerprint: KVFingerprint = FINGERPRINT,
    ) -> Worker:
        """Adds a worker. The other arguments replace ranks and block size of `fingerprint`."""
        return Worker(self, name, num_ranks, block_size, fingerprint)

    def make_pool(
        self, block_nbytes: int, fingerprint: KVFingerprint, rank: int
    ) -> tuple[Bytes, RankPool, dict[str, PoolReader]]:
        """A rank's pool as an array and as endpoints see it, and its readers."""
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

    def deliver(self) -> None:
        """Delivers everything under way, and all messages that follow from it."""
        self.world.run(until=self.world.now)

    def advance(self, seconds: float) -> None:
        """Advances the time, from event to event."""
        end = self.world.now + seconds
        self.deliver()
        self._look()
        self.world.run(until=end)
        self._look()
        self.deliver()

    def _look(self) -> None:
        """Lets every rank check its clock and its device."""
        for connector in self.connectors:
            connector.turn()

    def assert_at_rest(self) -> None:
        """Checks that no endpoint has a hand-over. Once idle pools are closed, no timer may be set."""
        endpoints = [connector.endpoint for connector in self.connectors]
        for endpoint in endpoints:
            endpoint.check_integrity()
        assert [len(endpoint) for endpoint in endpoints] == [0] * len(endpoints)
        self.advance(60.0)
        assert [endpoint.next_deadline() for endpoint in endpoints] == [None] * len(endpoints)
