"""How KV blocks move between workers, and how that can fail; knows no model, no scheduler and no Ray.

What is handed over is called a prompt here, although after a move it has what others sampled of the output, too. The
worker half (connector/worker.py) brings the transports and their packages; what runs one imports it from there, so that
the engine's memory and kernels do without.
"""

from kv_transfer.commands import KVConnectorMetadata
from kv_transfer.connector.ranks import RankConnector, RankedConnector
from kv_transfer.cuda.driver import CudaOutOfMemory
from kv_transfer.cuda.memory import CudaMemory, pinned_array
from kv_transfer.pool import DeviceBlocks
from kv_transfer.transport.shared_memory import SharedMemory

__all__ = [
    "CudaMemory",
    "CudaOutOfMemory",
    "DeviceBlocks",
    "KVConnectorMetadata",
    "RankConnector",
    "RankedConnector",
    "SharedMemory",
    "pinned_array",
]
