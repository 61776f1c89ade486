"""Which transports this worker offers: what the configuration asks for, as far as the machine has it."""

from collections.abc import Sequence

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.pool import DeviceBlocks
from kv_transfer.protocol.transports import CUDA_IPC, NIXL, SHARED_MEMORY, ZMQ_TCP, Reach
from kv_transfer.transport.base import Bytes, PoolReader, TransportError
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from kv_transfer.transport.nixl import NixlReader
from kv_transfer.transport.nixl_agent import Memory, has_rdma, nixl_is_available
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader, host_id


def make_readers(
    config: KVTransferConfig, blocks: Bytes | DeviceBlocks, memory: SharedMemory | None, clock: Clock
) -> list[PoolReader]:
    """Everything but bytes over the channel, the best first. `auto` takes NIXL only where there is RDMA to gain from.

    ConfigError if the transport asked for cannot be had here.
    """
    asked = config.transport
    readers: list[PoolReader] = []
    if isinstance(blocks, DeviceBlocks):
        if asked in ("auto", CUDA_IPC):
            readers.append(CudaIpcReader(blocks.memory))
        device = blocks.memory
        nixl_memory = Memory(device.address, device.nbytes, "VRAM", device.driver.device)
    else:
        if asked in ("auto", SHARED_MEMORY):
            readers.append(SharedMemoryReader(blocks, memory))
        nixl_memory = Memory.of(blocks)
    if asked == NIXL or (asked == "auto" and has_rdma() and nixl_is_available()):
        readers.append(_nixl_reader(nixl_memory, clock))
    if not readers and asked not in ("auto", ZMQ_TCP):
        where = "on a device" if isinstance(blocks, DeviceBlocks) else "in host memory"
        raise ConfigError(f"kv_transfer.transport: {asked} cannot move KV that is {where}")
    return readers


def _nixl_reader(memory: Memory, clock: Clock) -> NixlReader:
    try:
        return NixlReader(memory, clock)
    except TransportError as error:
        raise ConfigError(f"kv_transfer.transport: nixl cannot be set up here: {error}") from error


def make_reach(config: KVTransferConfig, readers: Sequence[PoolReader]) -> Reach:
    names = [reader.name for reader in readers]
    if config.transport in ("auto", ZMQ_TCP):
        names.append(ZMQ_TCP)
    described = {reader.name: reader.describe() for reader in readers}
    pools = {name: description for name, description in described.items() if description is not None}
    return Reach(host_id(), tuple(names), pools)
