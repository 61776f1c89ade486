"""What changed in the prefix cache, as those who follow it are told: netted, shortened, in messages of bounded size."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.block_hash import SHORT_HASH_BYTES
from baton.kv import BlocksCleared, BlocksStored, KVEvent

MAX_HASHES_PER_MESSAGE = 2**18
"""2 MiB of them: an account of the largest pool must not stand in the way of outputs for long."""


@dataclass(frozen=True, slots=True)
class KVChange:
    """The sum of many events; as in KVEvents, but of any size."""

    is_anew: bool
    removed: bytes
    stored: bytes


def net(events: Iterable[KVEvent]) -> KVChange | None:
    """One change for all of them: of each hash, only what happened last. None if nothing did."""
    is_anew = False
    is_stored: dict[bytes, bool] = {}
    for event in events:
        if isinstance(event, BlocksCleared):
            is_anew = True
            is_stored.clear()
            continue
        for block_hash in event.block_hashes:
            is_stored[block_hash[:SHORT_HASH_BYTES]] = isinstance(event, BlocksStored)
    if not is_anew and not is_stored:
        return None
    stored = b"".join([each for each, is_there in is_stored.items() if is_there])
    removed = b"".join([each for each, is_there in is_stored.items() if not is_there])
    return KVChange(is_anew, b"" if is_anew else removed, stored)


def parts(change: KVChange) -> Iterator[KVChange]:
    """The change in pieces that fit into a message, the first of which begins anew if it does; no hash is in two."""
    size = MAX_HASHES_PER_MESSAGE * SHORT_HASH_BYTES
    length = max(len(change.removed), len(change.stored), 1)
    for start in range(0, length, size):
        part = slice(start, start + size)
        yield KVChange(change.is_anew and start == 0, change.removed[part], change.stored[part])
