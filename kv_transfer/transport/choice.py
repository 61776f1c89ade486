"""Which transports this worker offers: what the configuration asks for, as far as the machine has it."""

from collections.abc import Sequence

from baton.config import KVTransferConfig
from kv_transfer.protocol.transports import SHARED_MEMORY, ZMQ_TCP, Reach
from kv_transfer.transport.base import Bytes, PoolReader
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader, host_id


def make_readers(config: KVTransferConfig, pool: Bytes, memory: SharedMemory | None) -> list[PoolReader]:
    """Everything but bytes over the channel, the best first."""
    readers: list[PoolReader] = []
    if config.transport in ("auto", SHARED_MEMORY):
        readers.append(SharedMemoryReader(pool, memory))
    return readers


def make_reach(config: KVTransferConfig, readers: Sequence[PoolReader]) -> Reach:
    names = [reader.name for reader in readers]
    if config.transport in ("auto", ZMQ_TCP):
        names.append(ZMQ_TCP)
    described = {reader.name: reader.describe() for reader in readers}
    pools = {name: description for name, description in described.items() if description is not None}
    return Reach(host_id(), tuple(names), pools)
