"""The queue: in order, past those that do not fit yet but not for ever, and no longer than each may wait."""

import math
from dataclasses import dataclass

import pytest

from baton.errors import Overloaded, RequestError, WorkerUnavailable
from gateway.requests.fair_queue import QueueEntry
from gateway.requests.queue import LOOK_AHEAD, MAX_PASSED, RequestQueue
from gateway.routing.placement import NoRoom


@dataclass(eq=False)
class Someone:
    name: str
    size: int = 1
    priority: int = 0
    is_resumed: bool = False
    has_worker: bool = True
    caller: str = "somebody"
    num_tokens: int = 10
    deadline: float | None = None
    """By which it has to begin."""


class House:
    """Room for so much; counts who is asked for."""

    def __init__(self, room: int = 0, max_queued: int = 10_000) -> None:
        self.room = room
        self.asked: list[str] = []
        self.placed: list[str] = []
        self.turned_away: dict[str, RequestError] = {}
        self.waiting = RequestQueue[Someone](max_queued, self.place, patience_s=30.0)

    def join(
        self, someone: Someone, now: float, *, ends_at: float | None = None, patience_s: float = math.inf
    ) -> QueueEntry[Someone] | None:
        """Its entry, if it waits; None if it was placed. Raises why it was refused itself."""
        entry = QueueEntry(
            item=someone,
            caller=someone.caller,
            num_tokens=someone.num_tokens,
            priority=someone.priority,
            is_resumed=someone.is_resumed,
            needs=lambda: someone.has_worker,
            begin_by=someone.deadline,
            deadline=ends_at,
            patience_s=patience_s,
        )
        if refusal := self.waiting.join(entry, now):
            refused, error = refusal
            assert refused not in self.waiting
            if refused is entry:
                raise error
            self.turned_away[refused.item.name] = error
        return entry if entry in self.waiting else None

    def place(self, entry: QueueEntry[Someone]) -> RequestError | None:
        someone = entry.item
        self.asked.append(someone.name)
        if not someone.has_worker:
            return WorkerUnavailable("no such worker")
        if someone.size > self.room:
            return NoRoom(f"{someone.size} do not fit")
        self.room -= someone.size
        self.placed.append(someone.name)
        return None

    def make_room(self, size: int, now: float = 0.0) -> None:
        self.room += size
        self.asked.clear()
        self.waiting.sweep(now)


def test_who_finds_room_does_not_wait() -> None:
    house = House(room=1)
    assert house.join(Someone("a"), 0.0) is None
    entry = house.join(Someone("b"), 1.0)
    assert entry is not None
    assert str(entry.reason) == "1 do not fit"
    assert (len(house.waiting), house.waiting.oldest_since) == (1, 1.0)


def test_the_line_is_in_order_of_priority_then_of_resumption_then_of_arrival() -> None:
    house = House()
    for someone in (
        Someone("new"),
        Someone("newer"),
        Someone("resumed", is_resumed=True),
        Someone("urgent", priority=-1),
        Someone("idle", priority=1, is_resumed=True),
    ):
        house.join(someone, 0.0)
    house.make_room(10)
    assert house.placed == ["urgent", "resumed", "new", "newer", "idle"]
    assert len(house.waiting) == 0


def test_who_left_is_not_asked_for() -> None:
    house = House()
    entry = house.join(Someone("a"), 0.0)
    assert entry is not None
    house.waiting.leave(entry, 0.0)
    house.waiting.leave(entry, 0.0)
    house.make_room(1)
    assert house.asked == []


def test_small_ones_pass_a_large_one_but_not_for_ever() -> None:
    house = House()
    house.join(Someone("large", size=5), 0.0)
    for number in range(MAX_PASSED + 10):
        house.join(Someone(f"small {number}"), 0.0)
    for _ in range(MAX_PASSED):
        house.make_room(1)
    assert house.placed == [f"small {number}" for number in range(MAX_PASSED)]
    house.make_room(1)
    house.make_room(3)
    assert len(house.placed) == MAX_PASSED, "now all room gathers for the large one"
    house.make_room(1)
    assert house.placed[-1] == "large"


def test_a_sweep_asks_for_few_however_many_wait() -> None:
    house = House()
    for number in range(1_000):
        house.join(Someone(str(number), size=3), 0.0)
    house.make_room(1)
    assert len(house.asked) == LOOK_AHEAD
    house.make_room(5)
    assert house.placed == ["0", "1"]
    assert len(house.asked) == LOOK_AHEAD + 2
    house.asked.clear()
    house.join(Someone("last"), 0.0)
    assert house.asked == [], "an arrival changes nothing for those before it"


def test_those_without_any_worker_hold_nobody_up() -> None:
    house = House()
    for number in range(2 * LOOK_AHEAD):
        house.join(Someone(f"hopeless {number}", has_worker=False), 0.0)
    house.join(Someone("modest"), 0.0)
    house.make_room(1)
    assert house.placed == ["modest"]
    assert house.asked == ["hopeless 0", "modest"]


def test_the_line_is_bounded_but_not_for_those_that_ran_already() -> None:
    house = House(max_queued=2)
    for name in "ab":
        house.join(Someone(name), 0.0)
    with pytest.raises(Overloaded, match="2 requests wait already: 1 do not fit") as caught:
        house.join(Someone("c"), 0.0)
    assert caught.value.retry_after_s > 0.0
    assert house.join(Someone("d", is_resumed=True), 0.0) is not None
    assert len(house.waiting) == 3
    with pytest.raises(WorkerUnavailable, match="no such worker"):
        house.join(Someone("e", has_worker=False), 0.0)


def test_those_that_ran_already_take_nobodys_seat() -> None:
    house = House(max_queued=1)
    for number in range(3):
        house.join(Someone(f"resumed {number}", is_resumed=True), 0.0)
    assert house.join(Someone("new"), 0.0) is not None
    with pytest.raises(Overloaded, match="4 requests wait already"):
        house.join(Someone("newer"), 0.0)
    assert house.join(Someone("urgent", priority=-1), 0.0) is not None
    assert list(house.turned_away) == ["new"]


def test_who_finds_room_need_not_wait_behind_many_for_whom_there_is_no_worker() -> None:
    house = House(room=1)
    for number in range(3 * LOOK_AHEAD):
        entry = house.join(Someone(f"n{number}", has_worker=False), 0.0)
        assert entry is not None
        assert isinstance(entry.reason, WorkerUnavailable), "each is told why, not only the first"
    assert house.join(Someone("a"), 0.0) is None


def test_who_is_urgent_is_placed_at_once_before_many_that_do_not_fit() -> None:
    house = House(room=1)
    for number in range(3 * LOOK_AHEAD):
        assert house.join(Someone(f"n{number}", size=9), 0.0) is not None
    assert house.join(Someone("a"), 0.0) is not None, "nobody looks that far"
    assert house.join(Someone("b", priority=-1), 0.0) is None


def test_callers_take_turns_however_many_requests_one_of_them_has_waiting() -> None:
    house = House()
    for number in range(1_000):
        house.join(Someone(f"greedy {number}", caller="greedy"), 0.0)
    house.join(Someone("modest", caller="modest"), 0.0)
    house.make_room(3)
    assert house.placed == ["greedy 0", "modest", "greedy 1"]


def test_a_full_line_makes_room_for_who_has_less_of_it() -> None:
    house = House(max_queued=3)
    for name in "abc":
        house.join(Someone(name, caller="greedy"), 0.0)
    assert house.join(Someone("x", caller="modest"), 0.0) is not None
    assert list(house.turned_away) == ["c"], "the latest of the caller that has most"
    error = house.turned_away["c"]
    assert isinstance(error, Overloaded)
    assert error.retry_after_s >= 1.0
    with pytest.raises(Overloaded, match="3 requests wait already"):
        house.join(Someone("d", caller="greedy"), 0.0)
    with pytest.raises(Overloaded):
        house.join(Someone("y", caller="modest"), 0.0)
    assert len(house.waiting) == 3
    house.make_room(3)
    assert house.placed == ["a", "x", "b"]


def test_a_full_line_makes_room_for_who_is_more_urgent() -> None:
    house = House(max_queued=2)
    house.join(Someone("a", priority=1), 0.0)
    house.join(Someone("b", caller="other"), 0.0)
    with pytest.raises(Overloaded):
        house.join(Someone("c", priority=2, caller="third"), 0.0)
    assert house.join(Someone("d", caller="third"), 0.0) is not None
    assert list(house.turned_away) == ["a"]


def moving_house(per_s: float) -> House:
    """A hundred wait, and for ten seconds so many a second found room."""
    house = House()
    for number in range(100 + round(10 * per_s)):
        house.join(Someone(str(number)), 0.0)
    for number in range(round(10 * per_s)):
        house.make_room(1, (number + 1) / per_s)
    assert len(house.waiting) == 100
    return house


def test_who_cannot_make_its_deadline_is_not_let_in() -> None:
    house = moving_house(per_s=10.0)
    with pytest.raises(Overloaded, match=r"must begin within 3\.0 s; 100 requests wait already") as caught:
        house.join(Someone("late", deadline=13.0), 10.0)
    assert caught.value.retry_after_s == pytest.approx(10.1, rel=0.1), "that is when its turn would be"
    assert len(house.waiting) == 100
    assert house.join(Someone("in time", deadline=21.0), 10.0) is not None
    assert house.join(Someone("patient"), 10.0) is not None


def test_nobody_is_refused_for_its_deadline_where_its_turn_comes_soon() -> None:
    house = moving_house(per_s=10.0)
    assert house.join(Someone("urgent", priority=-1, deadline=10.1), 10.0) is not None
    assert house.join(Someone("other", caller="other", deadline=10.1), 10.0) is not None
    assert house.join(Someone("resumed", is_resumed=True, deadline=10.1), 10.0) is not None


def test_nobody_is_refused_for_its_deadline_while_nobody_knows_how_fast_the_line_moves() -> None:
    house = House()
    for number in range(1_000):
        house.join(Someone(str(number)), 0.0)
    assert house.join(Someone("hasty", deadline=0.1), 0.0) is not None


def test_a_line_of_those_without_a_worker_says_nothing_of_when_others_are_served() -> None:
    house = House(room=20)
    for number in range(100):
        house.join(Someone(f"hopeless {number}", has_worker=False), 0.0)
    for number in range(20):
        house.join(Someone(f"served {number}"), float(number))
    assert house.join(Someone("hasty", deadline=20.0), 19.5) is not None


def test_who_comes_late_is_owed_nothing_for_the_time_before() -> None:
    house = House()
    for number in range(100):
        house.join(Someone(f"a{number}", caller="a"), 0.0)
    house.make_room(50)
    for number in range(50):
        house.join(Someone(f"b{number}", caller="b"), 0.0)
    house.placed.clear()
    house.make_room(10)
    assert [name[0] for name in house.placed].count("b") in (5, 6)


def test_who_had_much_and_comes_back_still_waits_its_turn() -> None:
    house = House()
    house.join(Someone("large", caller="a", num_tokens=100), 0.0)
    for number in range(20):
        house.join(Someone(f"b{number}", caller="b"), 0.0)
    house.make_room(1)
    assert house.placed == ["large"]
    house.join(Someone("again", caller="a"), 0.0)
    house.make_room(10)
    assert "again" not in house.placed
    house.make_room(2)
    assert "again" in house.placed


def test_time_without_a_line_counts_for_nothing() -> None:
    house = moving_house(per_s=10.0)
    house.make_room(100, 10.0)
    for number in range(100):
        house.join(Someone(f"late {number}"), 25.0)
    assert house.join(Someone("in time", deadline=25.0 + 8.0), 25.0) is not None


def test_who_was_served_before_and_pauses_is_owed_nothing_for_the_pause() -> None:
    house = House()
    house.join(Someone("large", caller="a", num_tokens=100), 0.0)
    for number in range(200):
        house.join(Someone(f"b{number}", caller="b"), 0.0)
    house.make_room(100)
    for number in range(50):
        house.join(Someone(f"a{number}", caller="a"), 0.0)
    house.placed.clear()
    house.make_room(10)
    assert [name[0] for name in house.placed].count("a") in (5, 6)


def test_each_waits_until_its_deadline_and_no_longer_than_it_may() -> None:
    house = House()
    house.join(Someone("deadline"), 0.0, ends_at=5.0, patience_s=30.0)
    house.join(Someone("patience"), 0.0, patience_s=3.0)
    house.join(Someone("neither"), 0.0)
    overdue: dict[str, float] = {}
    now = 0.0
    while len(overdue) < 2:
        following = house.waiting.next_deadline()
        assert following is not None
        assert now < following <= now + 1.0, "it looks whether the process stood still"
        now = following
        for entry in [*house.waiting.past_deadline(now), *house.waiting.out_of_patience(now)]:
            overdue[entry.item.name] = now
            house.waiting.leave(entry, now)
    assert overdue == {"deadline": 5.0, "patience": 3.0}
    assert len(house.waiting) == 1
    assert house.waiting.past_deadline(1e9) == house.waiting.out_of_patience(1e9) == []


def test_time_in_which_the_process_stood_still_is_not_waited() -> None:
    house = House()
    house.join(Someone("a"), 0.0, ends_at=60.0, patience_s=10.0)
    assert house.waiting.out_of_patience(1.0) == []
    assert house.waiting.out_of_patience(50.0) == [], "of that gap, one pace counts"
    following = house.waiting.next_deadline()
    assert following is not None
    assert following < 60.0
    assert [entry.item.name for entry in house.waiting.past_deadline(60.0)] == ["a"], (
        "a client's deadline counts it"
    )


def test_nothing_is_kept_of_those_that_left() -> None:
    house = House()
    for number in range(1_000):
        house.join(Someone(str(number)), 0.0, ends_at=1e6, patience_s=1e6)
        house.make_room(int(number > 2))
    assert len(house.waiting) == 3
    assert len(house.waiting._deadlines) < 100
    house.make_room(3)
    assert house.waiting.next_deadline() is None
    assert not house.waiting._deadlines
    assert not house.waiting._patience_ends
