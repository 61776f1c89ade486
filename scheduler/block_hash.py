"""Content hashes of full blocks, chained so that equal hashes mean equal prefixes; knows no pool.

    hash_i = blake2b(hash_{i-1} + tokens_i [+ salt, in block 0], key)

The hash is cryptographic and keyed because a hit serves one request's KV cache to another: with a cheap or predictable
hash (Python's own included) a client could build a prompt that collides with someone else's. 32 bytes
put an accidental collision out of reach, so a hit needs no second look at the tokens.
"""

from array import array
from hashlib import blake2b

from scheduler.request import Request

DIGEST_BYTES = 32
BYTES_PER_TOKEN = array("I").itemsize
MAX_TOKEN_ID = 2 ** (8 * BYTES_PER_TOKEN) - 1


class BlockHasher:
    """Extends a request's `block_hashes` as its tokens arrive; each block is hashed once in a request's life.

    Processes that should recognise each other's hashes share `key`, 16 to 64 secret bytes.
    """

    def __init__(self, block_size: int, key: bytes) -> None:
        self._block_size = block_size
        self._key = key

    def extend(self, request: Request) -> None:
        """Hashes the blocks that became full since the last call; costs nothing when none did."""
        hashes, tokens, size = request.block_hashes, request.all_token_ids, self._block_size
        content = array("I", tokens[len(hashes) * size : len(tokens) // size * size]).tobytes()
        parent = hashes[-1] if hashes else _root(request.cache_salt)
        for start in range(0, len(content), BYTES_PER_TOKEN * size):
            block = parent + content[start : start + BYTES_PER_TOKEN * size]
            parent = blake2b(block, digest_size=DIGEST_BYTES, key=self._key).digest()
            hashes.append(parent)
        request.next_hash_at = (len(hashes) + 1) * size


def _root(cache_salt: str | None) -> bytes:
    """The parent of block 0. No salt and the empty salt differ; every block below inherits the difference."""
    return b"" if cache_salt is None else b"salt:" + blake2b(cache_salt.encode()).digest()
