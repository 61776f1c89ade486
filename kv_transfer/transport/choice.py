"""Which transports this worker offers: those that are configured and that the machine supports."""

import logging
from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.pool import DeviceBlocks
from kv_transfer.protocol.transports import CUDA_IPC, NIXL, SHARED_MEMORY, ZMQ_TCP, TransportOffer
from kv_transfer.transport.base import Bytes, PoolReader, TransportError, host_id
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from kv_transfer.transport.nixl import NixlReader
from kv_transfer.transport.nixl_agent import NixlMemory, has_rdma, nixl_is_available
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader

logger = logging.getLogger(__name__)


def make_readers(
    config: KVTransferConfig, blocks: Bytes | DeviceBlocks, memory: SharedMemory | None, clock: Clock
) -> list[PoolReader]:
    """Readers of all transports but the channel, the best first. `auto` uses NIXL only with RDMA.

    A transport that does not work here is skipped with a warning, or raises ConfigError if the configuration names it.
    """
    configured = config.transport
    readers: list[PoolReader] = []
    makers = (
        _device_makers(blocks, clock)
        if isinstance(blocks, DeviceBlocks)
        else _host_makers(blocks, memory, clock)
    )
    if configured not in ("auto", ZMQ_TCP, *makers):
        where = "on a device" if isinstance(blocks, DeviceBlocks) else "in host memory"
        raise ConfigError(f"kv_transfer.transport: {configured} cannot move KV that is {where}")
    for name, make in makers.items():
        if configured != name and not (configured == "auto" and _auto_tries(name)):
            continue
        try:
            readers.append(make())
        except TransportError as error:
            reason = f"{name} cannot be set up here: {error}"
            if name == NIXL and isinstance(blocks, DeviceBlocks):
                reason += "; KV on a device needs a UCX with CUDA support (`ucx_info -d` lists cuda_copy)"
            if configured == name:
                raise ConfigError(f"kv_transfer.transport: {reason}") from error
            logger.warning("KV transport not available: %s", reason)
    return readers


def _auto_tries(name: str) -> bool:
    """Whether `auto` tries to use this transport on this machine. Without RDMA, other transports are as fast as
    NIXL."""
    return name != NIXL or (has_rdma() and nixl_is_available())


def _device_makers(blocks: DeviceBlocks, clock: Clock) -> dict[str, Callable[[], PoolReader]]:
    """Functions that make the readers for a pool on a device, by transport, the best first."""
    device = blocks.memory
    memory = NixlMemory(device.address, device.nbytes, "VRAM", device.driver.device)
    return {
        CUDA_IPC: lambda: CudaIpcReader(device),
        NIXL: lambda: NixlReader(memory, clock, device.driver.make_current),
    }


def _host_makers(
    blocks: Bytes, memory: SharedMemory | None, clock: Clock
) -> dict[str, Callable[[], PoolReader]]:
    """Functions that make the readers for a pool in host memory, by transport, the best first."""
    return {
        SHARED_MEMORY: lambda: SharedMemoryReader(blocks, memory),
        NIXL: lambda: NixlReader(NixlMemory.of(blocks), clock),
    }


def make_offer(config: KVTransferConfig, readers: Sequence[PoolReader]) -> TransportOffer:
    names = [reader.name for reader in readers]
    if config.transport in ("auto", ZMQ_TCP):
        names.append(ZMQ_TCP)
    described = {reader.name: reader.describe() for reader in readers}
    pools = {name: description for name, description in described.items() if description is not None}
    return TransportOffer(host_id(), tuple(names), pools)
