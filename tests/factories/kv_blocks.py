"""The bytes of a pool that is in host memory."""

import numpy as np

from engine.kv_cache import KVPool
from kv_transfer.transport.base import Bytes


def block_array(pool: KVPool) -> Bytes:
    """The pool as an array [num_blocks, bytes of a block], without a copy."""
    blocks = pool.block_bytes()
    assert isinstance(blocks, np.ndarray)
    return blocks
