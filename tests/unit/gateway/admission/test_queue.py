"""The queue: its order, which requests may pass a request that does not fit, and how long each may wait."""

from collections.abc import Callable

import pytest

from baton.errors import Overloaded, WorkerUnavailable
from gateway.admission.queue import LOOK_AHEAD, MAX_PASSED
from gateway.routing.placement import AwaitsPrompts, NoSlot
from tests.factories.queue_under_test import OVER_SHARE, QueueUnderTest, Request


def test_a_request_with_room_does_not_wait() -> None:
    queue = QueueUnderTest(room=1)
    assert queue.join(Request("a"), 0.0) is None
    entry = queue.join(Request("b"), 1.0)
    assert entry is not None
    assert str(entry.reason) == "1 do not fit"
    assert (len(queue.waiting), queue.waiting.oldest_since(for_worker=True)) == (1, 1.0)


def test_the_queue_is_in_order_of_priority_then_of_resumption_then_of_arrival() -> None:
    queue = QueueUnderTest()
    for request in (
        Request("new"),
        Request("newer"),
        Request("resumed", is_resumed=True),
        Request("urgent", priority=-1),
        Request("idle", priority=1, is_resumed=True),
    ):
        queue.join(request, 0.0)
    queue.make_room(10)
    assert queue.placed == ["urgent", "resumed", "new", "newer", "idle"]
    assert len(queue.waiting) == 0


def test_an_entry_that_left_is_not_tried() -> None:
    queue = QueueUnderTest()
    entry = queue.join(Request("a"), 0.0)
    assert entry is not None
    queue.waiting.leave(entry, 0.0)
    queue.waiting.leave(entry, 0.0)
    queue.make_room(1)
    assert queue.asked == []


def test_small_ones_pass_a_large_one_but_not_for_ever() -> None:
    queue = QueueUnderTest()
    queue.join(Request("large", size=5), 0.0)
    for number in range(MAX_PASSED + 10):
        queue.join(Request(f"small {number}"), 0.0)
    for _ in range(MAX_PASSED):
        queue.make_room(1)
    assert queue.placed == [f"small {number}" for number in range(MAX_PASSED)]
    queue.make_room(1)
    queue.make_room(3)
    assert len(queue.placed) == MAX_PASSED, "now all room gathers for the large request"
    queue.make_room(1)
    assert queue.placed[-1] == "large"


def test_a_sweep_asks_for_few_however_many_wait() -> None:
    queue = QueueUnderTest()
    for number in range(1_000):
        queue.join(Request(str(number), size=3), 0.0)
    queue.make_room(1)
    assert len(queue.asked) == LOOK_AHEAD
    queue.make_room(5)
    assert queue.placed == ["0", "1"]
    assert len(queue.asked) == LOOK_AHEAD + 2
    queue.asked.clear()
    queue.join(Request("last"), 0.0)
    assert queue.asked == [], "an arrival changes nothing for earlier requests"


def test_requests_without_any_worker_hold_up_no_other() -> None:
    queue = QueueUnderTest()
    for number in range(2 * LOOK_AHEAD):
        queue.join(Request(f"hopeless {number}", has_worker=False), 0.0)
    queue.join(Request("modest"), 0.0)
    queue.make_room(1)
    assert queue.placed == ["modest"]
    assert queue.asked == ["hopeless 0", "modest"]


def test_the_queue_is_bounded_except_for_requests_that_ran_already() -> None:
    queue = QueueUnderTest(max_queued=2)
    for name in "ab":
        queue.join(Request(name), 0.0)
    with pytest.raises(Overloaded, match="2 requests wait already: 1 do not fit") as caught:
        queue.join(Request("c"), 0.0)
    assert caught.value.retry_after_s > 0.0
    assert queue.join(Request("d", is_resumed=True), 0.0) is not None
    assert len(queue.waiting) == 3
    with pytest.raises(WorkerUnavailable, match="no such worker"):
        queue.join(Request("e", has_worker=False), 0.0)


def test_requests_that_ran_already_take_no_room_in_the_queue() -> None:
    queue = QueueUnderTest(max_queued=1)
    for number in range(3):
        queue.join(Request(f"resumed {number}", is_resumed=True), 0.0)
    assert queue.join(Request("new"), 0.0) is not None
    with pytest.raises(Overloaded, match="4 requests wait already"):
        queue.join(Request("newer"), 0.0)
    assert queue.join(Request("urgent", priority=-1), 0.0) is not None
    assert list(queue.refused_ones) == ["new"]


def test_a_request_with_room_does_not_wait_behind_many_without_any_worker() -> None:
    queue = QueueUnderTest(room=1)
    for number in range(3 * LOOK_AHEAD):
        entry = queue.join(Request(f"n{number}", has_worker=False), 0.0)
        assert entry is not None
        assert isinstance(entry.reason, WorkerUnavailable), "each learns why, not only the first"
    assert queue.join(Request("a"), 0.0) is None


def test_requests_of_a_caller_that_holds_its_share_hold_up_no_other_and_are_not_refused_for_time() -> None:
    queue = QueueUnderTest(room=10)
    for number in range(2 * LOOK_AHEAD):
        queue.join(Request(f"greedy {number}", caller="greedy", refusal=OVER_SHARE), 0.0, patience_s=5.0)
    queue.asked.clear()
    assert queue.join(Request("other"), 1.0) is None
    assert queue.join(Request("in time", deadline=1.0), 1.0) is None, "its turn is not after theirs"
    assert queue.asked == ["greedy 0", "other", "greedy 0", "in time"], "one refusal is enough for its caller"
    queue.join(Request("more", caller="greedy", refusal=OVER_SHARE), 1.0, patience_s=5.0)
    assert len(queue.asked) == 4, "nothing has changed for it"
    queue.join(Request("large", size=11), 1.0, patience_s=5.0)
    refused = [entry.item.name for now in range(2, 20) for entry in queue.waiting.out_of_patience(float(now))]
    assert refused == ["large"]


def test_requests_that_were_taken_back_wait_for_their_callers_turn_before_its_new_ones() -> None:
    queue = QueueUnderTest(max_queued=3)
    for name, caller in (("new", "a"), ("other", "b"), ("others next", "b")):
        queue.join(Request(name, caller=caller), 0.0)
    queue.join(Request("taken back", caller="a", was_taken_back=True), 0.0)
    with pytest.raises(Overloaded):
        queue.join(Request("too many", caller="c", priority=1), 0.0)
    queue.make_room(10)
    assert queue.placed == ["other", "taken back", "new", "others next"]
    assert len(queue.waiting) == 0


def test_an_urgent_request_is_placed_at_once_before_many_that_do_not_fit() -> None:
    queue = QueueUnderTest(room=1)
    for number in range(3 * LOOK_AHEAD):
        assert queue.join(Request(f"n{number}", size=9), 0.0) is not None
    assert queue.join(Request("a"), 0.0) is not None, "no sweep looks that far"
    assert queue.join(Request("b", priority=-1), 0.0) is None


def test_callers_take_turns_however_many_requests_one_of_them_has_waiting() -> None:
    queue = QueueUnderTest()
    for number in range(1_000):
        queue.join(Request(f"greedy {number}", caller="greedy"), 0.0)
    queue.join(Request("modest", caller="modest"), 0.0)
    queue.make_room(3)
    assert queue.placed == ["greedy 0", "modest", "greedy 1"]


def test_a_full_queue_makes_room_for_a_caller_with_fewer_requests() -> None:
    queue = QueueUnderTest(max_queued=3)
    for name in "abc":
        queue.join(Request(name, caller="greedy"), 0.0)
    assert queue.join(Request("x", caller="modest"), 0.0) is not None
    assert list(queue.refused_ones) == ["c"], "the latest of the caller with the most requests"
    error = queue.refused_ones["c"]
    assert isinstance(error, Overloaded)
    assert error.retry_after_s >= 1.0
    with pytest.raises(Overloaded, match="3 requests wait already"):
        queue.join(Request("d", caller="greedy"), 0.0)
    with pytest.raises(Overloaded):
        queue.join(Request("y", caller="modest"), 0.0)
    assert len(queue.waiting) == 3
    queue.make_room(3)
    assert queue.placed == ["a", "x", "b"]


def test_a_full_queue_makes_room_for_a_more_urgent_request() -> None:
    queue = QueueUnderTest(max_queued=2)
    queue.join(Request("a", priority=1), 0.0)
    queue.join(Request("b", caller="other"), 0.0)
    with pytest.raises(Overloaded):
        queue.join(Request("c", priority=2, caller="third"), 0.0)
    assert queue.join(Request("d", caller="third"), 0.0) is not None
    assert list(queue.refused_ones) == ["a"]


def moving_queue(per_s: float) -> QueueUnderTest:
    """A queue of a hundred that moved for ten seconds at this rate."""
    queue = QueueUnderTest()
    for number in range(100 + round(10 * per_s)):
        queue.join(Request(str(number)), 0.0)
    for number in range(round(10 * per_s)):
        queue.make_room(1, (number + 1) / per_s)
    assert len(queue.waiting) == 100
    return queue


def test_a_request_that_cannot_meet_its_deadline_is_refused() -> None:
    queue = moving_queue(per_s=10.0)
    with pytest.raises(Overloaded, match=r"must start within 3\.0 s; 100 requests wait already") as caught:
        queue.join(Request("late", deadline=13.0), 10.0)
    assert caught.value.retry_after_s == pytest.approx(10.1, rel=0.1), "when its turn would come"
    assert len(queue.waiting) == 100
    assert queue.join(Request("in time", deadline=21.0), 10.0) is not None
    assert queue.join(Request("patient"), 10.0) is not None


def test_no_request_is_refused_for_its_deadline_if_its_turn_comes_soon() -> None:
    queue = moving_queue(per_s=10.0)
    assert queue.join(Request("urgent", priority=-1, deadline=10.1), 10.0) is not None
    assert queue.join(Request("other", caller="other", deadline=10.1), 10.0) is not None
    assert queue.join(Request("resumed", is_resumed=True, deadline=10.1), 10.0) is not None


def test_no_request_is_refused_for_its_deadline_while_the_queues_rate_is_unknown() -> None:
    queue = QueueUnderTest()
    for number in range(1_000):
        queue.join(Request(str(number)), 0.0)
    assert queue.join(Request("hasty", deadline=0.1), 0.0) is not None


def test_a_queue_of_requests_without_a_worker_does_not_count_for_the_rate() -> None:
    queue = QueueUnderTest(room=20)
    for number in range(100):
        queue.join(Request(f"hopeless {number}", has_worker=False), 0.0)
    for number in range(20):
        queue.join(Request(f"served {number}"), float(number))
    assert queue.join(Request("hasty", deadline=20.0), 19.5) is not None


@pytest.mark.parametrize("was_served", [False, True], ids=["a new caller", "one that paused"])
def test_a_caller_that_asked_for_nothing_has_saved_nothing_up(was_served: bool) -> None:
    queue = QueueUnderTest()
    if was_served:
        queue.join(Request("large", caller="a", num_tokens=100), 0.0)
    for number in range(200):
        queue.join(Request(f"b{number}", caller="b"), 0.0)
    queue.make_room(100)
    for number in range(50):
        queue.join(Request(f"a{number}", caller="a"), 0.0)
    queue.placed.clear()
    queue.make_room(10)
    assert [name[0] for name in queue.placed].count("a") in (5, 6)


def test_a_caller_that_was_served_a_large_request_waits_its_turn() -> None:
    queue = QueueUnderTest()
    queue.join(Request("large", caller="a", num_tokens=100), 0.0)
    for number in range(20):
        queue.join(Request(f"b{number}", caller="b"), 0.0)
    queue.make_room(1)
    assert queue.placed == ["large"]
    queue.join(Request("again", caller="a"), 0.0)
    queue.make_room(10)
    assert "again" not in queue.placed
    queue.make_room(2)
    assert "again" in queue.placed


def test_time_without_waiting_requests_does_not_count() -> None:
    queue = moving_queue(per_s=10.0)
    queue.make_room(100, 10.0)
    for number in range(100):
        queue.join(Request(f"late {number}"), 25.0)
    assert queue.join(Request("in time", deadline=25.0 + 8.0), 25.0) is not None


def test_each_waits_until_its_deadline_and_no_longer_than_it_may() -> None:
    queue = QueueUnderTest()
    queue.join(Request("deadline"), 0.0, ends_at=5.0, patience_s=30.0)
    queue.join(Request("patience"), 0.0, patience_s=3.0)
    queue.join(Request("neither"), 0.0)
    overdue: dict[str, float] = {}
    now = 0.0
    while len(overdue) < 2:
        following = queue.waiting.next_deadline()
        assert following is not None
        assert now < following <= now + 1.0, "it must look for standstills"
        now = following
        for entry in [*queue.waiting.past_deadline(now), *queue.waiting.out_of_patience(now)]:
            overdue[entry.item.name] = now
            queue.waiting.leave(entry, now)
    assert overdue == {"deadline": 5.0, "patience": 3.0}
    assert len(queue.waiting) == 1
    assert queue.waiting.past_deadline(1e9) == queue.waiting.out_of_patience(1e9) == []


def refused_until(queue: QueueUnderTest, end: float, happens: Callable[[float], None]) -> dict[str, float]:
    """The requests that run out of patience, and when. `happens` gets each full second."""
    refused: dict[str, float] = {}
    for now in range(1, int(end) + 1):
        happens(float(now))
        queue.waiting.out_of_patience(now + 0.5)  # only a regular look is no standstill
        for entry in queue.waiting.out_of_patience(now + 1.0):
            refused[entry.item.name] = now + 1.0
            queue.waiting.leave(entry, now + 1.0)
    return refused


def test_a_request_waits_on_while_its_place_gets_better() -> None:
    queue = QueueUnderTest()
    names = [str(number) for number in range(5)]
    for name in names:
        queue.join(Request(name), 0.0, patience_s=30.0)
    assert not refused_until(queue, 140.0, lambda now: queue.make_room(int(now % 25 == 0), now))
    assert queue.placed == names


def test_requests_that_lack_only_a_slot_wait_on_while_long_answers_run_unless_many_overtake_them() -> None:
    """Without this rule, simultaneous requests were refused if no answer ended within their patience."""
    queue, full = QueueUnderTest(), NoSlot("all slots are taken")
    for number in range(2 * LOOK_AHEAD):  # a sweep does not reach all of them
        queue.join(Request(str(number), refusal=full), 0.0, patience_s=30.0)

    def overtake(now: float) -> None:
        if now % 5 == 0.0:
            queue.join(Request("urgent", priority=-1), now, patience_s=30.0)
            queue.make_room(1, now)
        queue.waiting.sweep(now)

    refused = refused_until(queue, 400.0, overtake)
    assert len(queue.placed) > MAX_PASSED
    assert set(refused.values()) == {30.0 * ((MAX_PASSED + 1) * 5 // 30 + 1)}


def test_a_request_that_waited_for_a_slot_waits_as_long_as_any_other_for_a_worker_that_is_lost() -> None:
    queue = QueueUnderTest()
    request = Request("a", refusal=NoSlot("all slots are taken"))
    queue.join(request, 0.0, patience_s=30.0)

    def lose_worker(now: float) -> None:
        if now == 85.0:
            request.refusal = WorkerUnavailable("no decode worker is available")
        queue.waiting.sweep(now)

    assert refused_until(queue, 200.0, lose_worker) == {"a": 115.0}


def test_a_request_that_waits_until_prompts_are_computed_does_not_wait_for_a_decode_worker() -> None:
    queue = QueueUnderTest()
    queue.join(Request("a", refusal=AwaitsPrompts("its slot is kept for another prompt")), 1.0)
    assert queue.waiting.oldest_since(for_worker=True) is None
    queue.join(Request("b", refusal=NoSlot("all slots are taken")), 2.0)
    assert queue.waiting.oldest_since(for_worker=True) == 2.0


def test_a_place_that_gets_better_because_others_are_refused_prolongs_no_wait() -> None:
    queue = QueueUnderTest()

    def join(now: float) -> None:
        if now <= 3.0:
            queue.join(Request(f"joined at {now:g}"), now, patience_s=30.0)

    refused = refused_until(queue, 100.0, join)
    assert refused == {"joined at 1": 31.0, "joined at 2": 32.0, "joined at 3": 33.0}


def test_neither_a_request_that_others_overtake_nor_one_without_a_worker_waits_for_ever() -> None:
    queue = QueueUnderTest()
    queue.join(Request("idle", priority=1), 0.0, patience_s=30.0)
    queue.join(Request("hopeless", has_worker=False), 0.0, patience_s=30.0)

    def move(now: float) -> None:
        queue.join(Request(f"urgent {now:g}", priority=-1), now, patience_s=30.0)
        queue.make_room(1, now)

    assert refused_until(queue, 100.0, move) == {"hopeless": 30.0, "idle": 30.0}


def test_time_in_which_the_process_stood_still_is_not_waited() -> None:
    queue = QueueUnderTest()
    queue.join(Request("a"), 0.0, ends_at=60.0, patience_s=10.0)
    assert queue.waiting.out_of_patience(1.0) == []
    assert queue.waiting.out_of_patience(50.0) == [], "only one pace of that gap counts"
    following = queue.waiting.next_deadline()
    assert following is not None
    assert following < 60.0
    assert [entry.item.name for entry in queue.waiting.past_deadline(60.0)] == ["a"], (
        "a client's deadline counts it"
    )


def test_nothing_is_kept_of_entries_that_left() -> None:
    queue = QueueUnderTest()
    for number in range(1_000):
        queue.join(Request(str(number)), 0.0, ends_at=1e6, patience_s=1e6)
        queue.make_room(int(number > 2))
    assert len(queue.waiting) == 3
    assert len(queue.waiting._deadlines) < 100
    queue.make_room(3)
    assert queue.waiting.next_deadline() is None
    assert not queue.waiting._deadlines
    assert not queue.waiting._patience_ends
