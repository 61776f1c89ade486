"""Changes of the prefix cache for its subscribers: merged, with shortened hashes, in messages of bounded size."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.block_hash import SHORT_HASH_BYTES
from baton.kv import BlocksCleared, BlocksStored, KVEvent

MAX_HASHES_PER_MESSAGE = 2**13
"""The most hashes in one message. A gateway applies a message without a pause, which takes some milliseconds with this
many hashes. Between two messages of a large listing, it can read the outputs of other workers."""


@dataclass(frozen=True, slots=True)
class KVChange:
    """The sum of many events; like KVEvents, but of any size."""

    is_anew: bool
    removed: bytes
    stored: bytes


def merge_events(events: Iterable[KVEvent]) -> KVChange | None:
    """Merges events into one change, with only the last event of each hash. None if nothing changed."""
    match events := tuple(events):
        case BlocksCleared(), BlocksStored(hashes):  # a full listing, which names each hash once
            return KVChange(True, b"", b"".join([each[:SHORT_HASH_BYTES] for each in hashes]))
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


def split_change(change: KVChange) -> Iterator[KVChange]:
    """The change in parts that fit into a message. Of a full listing, only the first part has `is_anew`. Each hash is
    in one part only.
    """
    size = MAX_HASHES_PER_MESSAGE * SHORT_HASH_BYTES
    length = max(len(change.removed), len(change.stored), 1)
    for start in range(0, length, size):
        part = slice(start, start + size)
        yield KVChange(change.is_anew and start == 0, change.removed[part], change.stored[part])
