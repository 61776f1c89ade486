"""How KV blocks move between workers, and how that can fail; knows no model, no scheduler and no Ray.

Here, "prompt" means the tokens that are handed over. If a request has moved from another worker, these tokens include
output that the other worker sampled. The worker half (connector/worker.py) imports the transports and their packages.
Import it directly from that module: then the engine's memory and kernels, which import only this package, need no
transport package.
"""

from kv_transfer.commands import KVConnectorMetadata
from kv_transfer.connector.ranks import BlockMover, RankedConnector
from kv_transfer.cuda.driver import CudaOutOfMemory
from kv_transfer.cuda.memory import CudaMemory, pinned_array
from kv_transfer.pool import DeviceBlocks
from kv_transfer.transport.shared_memory import SharedMemory

__all__ = [
    "BlockMover",
    "CudaMemory",
    "CudaOutOfMemory",
    "DeviceBlocks",
    "KVConnectorMetadata",
    "RankedConnector",
    "SharedMemory",
    "pinned_array",
]
