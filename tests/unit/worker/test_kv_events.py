"""What subscribers of a prefix cache receive: the sum of all changes, in pieces that fit a message."""

import random

from baton.block_hash import SHORT_HASH_BYTES
from baton.kv import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from worker.kv_events import MAX_HASHES_PER_MESSAGE, KVChange, merge_events, split_change


def name(number: int) -> bytes:
    return number.to_bytes(SHORT_HASH_BYTES, "big") + b"the rest of the hash...."


def short(*numbers: int) -> bytes:
    return b"".join(name(number)[:SHORT_HASH_BYTES] for number in numbers)


def apply(known: set[bytes], change: KVChange) -> None:
    """As a reader does it."""
    if change.is_anew:
        known.clear()
    size = SHORT_HASH_BYTES
    known -= {change.removed[at : at + size] for at in range(0, len(change.removed), size)}
    known |= {change.stored[at : at + size] for at in range(0, len(change.stored), size)}


def test_of_each_hash_only_the_last_word_counts() -> None:
    events: list[KVEvent] = [
        BlocksStored((name(1), name(2))),
        BlocksRemoved((name(1),)),
        BlocksStored((name(3),)),
    ]
    assert merge_events(events) == KVChange(False, short(1), short(2, 3))
    assert merge_events([BlocksRemoved((name(1),)), BlocksStored((name(1),))]) == KVChange(
        False, b"", short(1)
    )
    assert merge_events([]) is None


def test_what_went_before_a_listing_is_forgotten() -> None:
    events: list[KVEvent] = [
        BlocksStored((name(1),)),
        BlocksCleared(),
        BlocksStored((name(2),)),
        BlocksRemoved((name(3),)),
    ]
    assert merge_events(events) == KVChange(True, b"", short(2))
    assert merge_events([BlocksCleared()]) == KVChange(True, b"", b"")
    assert merge_events([BlocksCleared(), BlocksStored((name(1), name(2)))]) == KVChange(
        True, b"", short(1, 2)
    )


def test_a_reader_of_changes_knows_what_a_reader_of_events_does() -> None:
    rng = random.Random(7)
    truth: set[bytes] = set()
    known: set[bytes] = set()
    for _ in range(200):
        events: list[KVEvent] = []
        for _ in range(rng.randrange(12)):
            block_hash = name(rng.randrange(20))
            if rng.random() < 0.05:
                events.append(BlocksCleared())
                truth.clear()
            elif block_hash in truth:
                events.append(BlocksRemoved((block_hash,)))
                truth.remove(block_hash)
            else:
                events.append(BlocksStored((block_hash,)))
                truth.add(block_hash)
        if (change := merge_events(events)) is not None:
            for part in split_change(change):
                apply(known, part)
        assert known == {block_hash[:SHORT_HASH_BYTES] for block_hash in truth}


def test_a_large_listing_comes_in_parts_of_which_the_first_begins_anew() -> None:
    stored = bytes(range(256)) * (2 * MAX_HASHES_PER_MESSAGE * SHORT_HASH_BYTES // 256) + short(9)
    pieces = list(split_change(KVChange(True, b"", stored)))
    assert [piece.is_anew for piece in pieces] == [True, False, False]
    assert b"".join(piece.stored for piece in pieces) == stored
    assert max(len(piece.stored) for piece in pieces) == MAX_HASHES_PER_MESSAGE * SHORT_HASH_BYTES
    assert list(split_change(KVChange(True, b"", b""))) == [KVChange(True, b"", b"")]
    more = KVChange(False, stored[:16], stored)
    assert [len(piece.removed) for piece in split_change(more)] == [16, 0, 0]
