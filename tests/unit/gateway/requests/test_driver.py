"""What waits for its reader: merged, in order, bounded."""

import asyncio

import pytest

from baton.errors import SlowReader, WorkerUnavailable
from baton.request import TokenLogprobs
from gateway.requests.driver import UnreadAnswer
from gateway.requests.request import Delta


def read(unread: UnreadAnswer) -> Delta:
    return asyncio.run(asyncio.wait_for(unread.read(), 60))


def test_what_waits_together_is_read_together_and_in_order() -> None:
    unread = UnreadAnswer(100)
    first, second = TokenLogprobs(1, -0.5, 1, ()), TokenLogprobs(2, -0.25, 2, ())
    unread.put(Delta((1,), "a", (first,)))
    unread.put(Delta((2, 3), "bc", (second,)))
    assert read(unread) == Delta((1, 2, 3), "abc", (first, second))
    unread.put(Delta((4,), "d"))
    assert read(unread) == Delta((4,), "d")


def test_who_reads_faster_waits_for_more() -> None:
    async def test() -> Delta:
        unread = UnreadAnswer(100)
        reading = asyncio.create_task(unread.read())
        await asyncio.sleep(0)
        assert not reading.done()
        unread.put(Delta((1,), "a"))
        return await asyncio.wait_for(reading, 60)

    assert asyncio.run(test()) == Delta((1,), "a")


def test_a_failure_comes_once_and_behind_what_came_before_it() -> None:
    unread = UnreadAnswer(100)
    unread.put(Delta((1,), "a"))
    unread.fail(WorkerUnavailable("gone"))
    assert read(unread).token_ids == (1,)
    with pytest.raises(WorkerUnavailable, match="gone"):
        read(unread)


def test_nothing_is_read_of_what_was_cut_short() -> None:
    unread = UnreadAnswer(100)
    unread.put(Delta((1,), "a"))
    unread.fail(WorkerUnavailable("gone"))
    unread.cut_short(WorkerUnavailable("over"))
    with pytest.raises(WorkerUnavailable, match="over"):
        read(unread)


def test_no_more_waits_than_may() -> None:
    unread = UnreadAnswer(3)
    unread.put(Delta((1, 2, 3), "abc"))
    assert len(read(unread).token_ids) == 3
    assert unread.put(Delta((1, 2), "ab"))
    assert not unread.put(Delta((3, 4), "cd"))
    with pytest.raises(SlowReader, match="4 tokens of its answer wait, and at most 3 may"):
        read(unread)
