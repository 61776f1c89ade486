"""Content hashes of full blocks, chained so that equal hashes mean equal prefixes; knows no pool and no request.

    hash_i = blake2b(hash_{i-1} + tokens_i, key)      in block 0, a digest of the salt takes the place of hash_{i-1}

The hash is cryptographic and keyed because after a hit, one request uses the KV cache of another. With a
cheap or predictable hash (Python's own included), a client could build a prompt that collides with another
client's. With 32 bytes, an accidental collision is practically impossible, so a hit does not compare the
tokens.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32
SHORT_HASH_BYTES = 8
"""How many bytes of a hash a router stores. If two of these collide, only the choice of a worker gets worse."""


def block_hashes(
    token_ids: Sequence[int], block_size: int, key: bytes, cache_salt: str | None = None
) -> list[bytes]:
    """The hash of each full block of `token_ids`; equal in all processes with this `key` (16 to 64 bytes)."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, key, cache_salt)
    return hashes


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    key: bytes,
    cache_salt: str | None,
    max_blocks: int | None = None,
) -> None:
    """Appends the missing hashes of full blocks, until `hashes` has `max_blocks`; no cost if none is missing.

    Raises OverflowError for a token id that does not fit into 32 bits, unsigned.
    """
    num_blocks = len(token_ids) // block_size
    end = num_blocks if max_blocks is None else min(num_blocks, max_blocks)
    content = array("I", token_ids[len(hashes) * block_size : end * block_size])
    data, size = content.tobytes(), content.itemsize * block_size
    parent = hashes[-1] if hashes else _root(cache_salt)
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=DIGEST_BYTES, key=key).digest()
        hashes.append(parent)


def _root(cache_salt: str | None) -> bytes:
    """The parent of block 0. It differs between no salt and an empty salt. So the hashes of all blocks differ, too."""
    return b"" if cache_salt is None else b"salt:" + blake2b(cache_salt.encode()).digest()
