"""The queue is fair: no caller starves, no room stays free while a request waits for it, and shares are bounded."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import RequestError
from gateway.admission.fair_queue import QueueEntry
from gateway.admission.queue import LOOK_AHEAD, MAX_PASSED, RequestQueue
from gateway.routing.placement import NoRoom

MAX_TOKENS = 50

CALLERS = st.sampled_from("abcd")
TOKENS = st.integers(1, MAX_TOKENS)


def request(
    caller: str, num_tokens: int, size: int = 1, priority: int = 0, is_resumed: bool = False
) -> QueueEntry[int]:
    """A request that takes this much room."""
    return QueueEntry(
        item=size, caller=caller, num_tokens=num_tokens, priority=priority, is_resumed=is_resumed
    )


class Room:
    def __init__(self) -> None:
        self.free = 0
        self.placed: list[QueueEntry[int]] = []
        self.queue = RequestQueue[int](10**6, self.place, patience_s=30.0)

    def place(self, entry: QueueEntry[int]) -> RequestError | None:
        if entry.item > self.free:
            return NoRoom("full")
        self.free -= entry.item
        self.placed.append(entry)
        return None

    def join(self, entry: QueueEntry[int]) -> QueueEntry[int]:
        assert self.queue.join(entry, 0.0) is None, "none is refused"
        return entry


@given(
    backlog=st.lists(st.tuples(CALLERS, TOKENS), min_size=1, max_size=120),
    num_served=st.integers(1, 120),
    leavers=st.sets(st.integers(0, 119)),
)
@settings(deadline=None)
def test_none_of_those_that_wait_gets_ahead_by_more_than_the_largest_of_each(
    backlog: list[tuple[str, int]], num_served: int, leavers: set[int]
) -> None:
    room = Room()
    waiting = Counter[str]()
    entries: list[QueueEntry[int]] = []
    for caller, num_tokens in backlog:
        entries.append(room.join(request(caller, num_tokens)))
        waiting[caller] += 1
    for number in sorted(leavers):
        if number < len(entries):
            room.queue.leave(entries[number], 0.0)
            waiting[entries[number].caller] -= 1
    served = Counter[str]()
    for _ in range(num_served):
        busy = [caller for caller, count in waiting.items() if count]
        if not busy:
            break
        room.free = 1
        room.queue.sweep(0.0)
        last = room.placed[-1]
        served[last.caller] += last.num_tokens
        waiting[last.caller] -= 1
        still = [caller for caller, count in waiting.items() if count]
        for one in still:
            for other in still:
                assert served[one] - served[other] <= 2 * MAX_TOKENS


@given(
    steps=st.lists(
        st.one_of(
            st.builds(request, CALLERS, TOKENS, st.integers(1, 4), st.integers(0, 1), st.booleans()),
            st.integers(1, 6),
        ),
        max_size=150,
    )
)
@settings(deadline=None)
def test_room_is_not_left_while_one_in_sight_would_fit(steps: list[QueueEntry[int] | int]) -> None:
    room = Room()
    num_joined = 0
    for step in steps:
        if isinstance(step, QueueEntry):
            room.join(step)
            num_joined += 1
        else:
            room.free += step
        if not isinstance(step, QueueEntry) or step.is_resumed:
            room.queue.sweep(0.0)
        assert len(room.queue) + len(room.placed) == num_joined
        for entry in list(room.queue._queue)[:LOOK_AHEAD]:
            if entry.num_passed >= MAX_PASSED:
                break
            assert entry.item > room.free


@given(stream=st.lists(st.tuples(CALLERS, TOKENS, st.integers(1, 2)), min_size=600, max_size=600))
@settings(max_examples=15, deadline=None)
def test_no_caller_starves(stream: list[tuple[str, int, int]]) -> None:
    """A large request gets its room, although all callers keep sending smaller ones, and each of these finds room."""
    room = Room()
    large = room.join(request("a", MAX_TOKENS, size=3))
    for caller, num_tokens, made in stream:
        room.join(request(caller, num_tokens))
        room.free += made
        room.queue.sweep(0.0)
        if large in room.placed:
            return
    raise AssertionError("it was never placed")
