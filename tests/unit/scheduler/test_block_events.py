"""Events of the prefix cache: what a reader gets if it takes them rarely, or only after the cache was emptied."""

from baton.kv import BlocksCleared, BlocksRemoved, BlocksStored
from scheduler.block_events import BlockEvents


def test_events_before_the_cache_was_emptied_are_dropped() -> None:
    events = BlockEvents(9, list)
    events.stored(b"a")
    events.cleared()
    events.stored(b"b")
    events.removed(b"b")
    assert events.take_events() == [BlocksCleared(), BlocksStored((b"b",)), BlocksRemoved((b"b",))]
    assert events.take_events() == []


def test_one_full_listing_replaces_more_events_than_may_be_unread() -> None:
    events = BlockEvents(2, lambda: [b"x", b"y"])
    for block_hash in (b"a", b"b"):
        events.stored(block_hash)
    assert events.take_events() == [BlocksStored((b"a", b"b"))]
    for block_hash in (b"c", b"d", b"e"):
        events.stored(block_hash)
    assert events.take_events() == [BlocksCleared(), BlocksStored((b"x", b"y"))]
    events.stored(b"f")
    assert events.take_events() == [BlocksStored((b"f",))]
