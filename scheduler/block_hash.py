"""BlockHasher: keeps a request's block hashes up to date with its tokens; baton/block_hash.py defines the hashes."""

from baton.block_hash import extend_block_hashes
from scheduler.request import Request


class BlockHasher:
    """Extends a request's `block_hashes` as its tokens arrive; each block is hashed once in a request's life.

    Processes that should recognise each other's hashes share `key`, 16 to 64 secret bytes.
    """

    def __init__(self, block_size: int, key: bytes) -> None:
        self._block_size = block_size
        self._key = key

    def extend(self, request: Request) -> None:
        """Hashes the blocks that became full since the last call; costs nothing if none did."""
        hashes, size = request.block_hashes, self._block_size
        extend_block_hashes(hashes, request.all_token_ids, size, self._key, request.cache_salt)
        request.next_hash_at = (len(hashes) + 1) * size
