"""The waiting room: in order, past those that do not fit yet, and for ever past nobody."""

from dataclasses import dataclass

import pytest

from baton.errors import Overloaded, RequestError, WorkerUnavailable
from gateway.routing.placement import NoRoom
from gateway.waiting import LOOK_AHEAD, MAX_PASSED, WaitingRoom


@dataclass(eq=False)
class Someone:
    name: str
    size: int = 1
    priority: int = 0
    is_resumed: bool = False
    has_worker: bool = True

    def needs(self) -> object:
        return self.has_worker


class House:
    """Room for so much; counts who is asked for."""

    def __init__(self, room: int = 0, max_queued: int = 10_000) -> None:
        self.room = room
        self.asked: list[str] = []
        self.placed: list[str] = []
        self.waiting = WaitingRoom[Someone](max_queued, self.place)

    def place(self, someone: Someone) -> RequestError | None:
        self.asked.append(someone.name)
        if not someone.has_worker:
            return WorkerUnavailable("no such worker")
        if someone.size > self.room:
            return NoRoom(f"{someone.size} do not fit")
        self.room -= someone.size
        self.placed.append(someone.name)
        return None

    def make_room(self, size: int) -> None:
        self.room += size
        self.asked.clear()
        self.waiting.sweep()


def test_who_finds_room_does_not_wait() -> None:
    house = House(room=1)
    assert house.waiting.join(Someone("a"), 0.0) is None
    seat = house.waiting.join(Someone("b"), 1.0)
    assert seat is not None
    assert str(seat.reason) == "1 do not fit"
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
        house.waiting.join(someone, 0.0)
    house.make_room(10)
    assert house.placed == ["urgent", "resumed", "new", "newer", "idle"]
    assert len(house.waiting) == 0


def test_who_left_is_not_asked_for() -> None:
    house = House()
    seat = house.waiting.join(Someone("a"), 0.0)
    assert seat is not None
    house.waiting.leave(seat)
    house.waiting.leave(seat)
    house.make_room(1)
    assert house.asked == []


def test_small_ones_pass_a_large_one_but_not_for_ever() -> None:
    house = House()
    house.waiting.join(Someone("large", size=5), 0.0)
    for number in range(MAX_PASSED + 10):
        house.waiting.join(Someone(f"small {number}"), 0.0)
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
        house.waiting.join(Someone(str(number), size=3), 0.0)
    house.make_room(1)
    assert len(house.asked) == LOOK_AHEAD
    house.make_room(5)
    assert house.placed == ["0", "1"]
    assert len(house.asked) == LOOK_AHEAD + 2
    house.asked.clear()
    house.waiting.join(Someone("last"), 0.0)
    assert house.asked == [], "an arrival changes nothing for those before it"


def test_those_without_any_worker_hold_nobody_up() -> None:
    house = House()
    for number in range(2 * LOOK_AHEAD):
        house.waiting.join(Someone(f"hopeless {number}", has_worker=False), 0.0)
    house.waiting.join(Someone("modest"), 0.0)
    house.make_room(1)
    assert house.placed == ["modest"]
    assert house.asked == ["hopeless 0", "modest"]


def test_the_line_is_bounded_but_not_for_those_that_ran_already() -> None:
    house = House(max_queued=2)
    for name in "ab":
        house.waiting.join(Someone(name), 0.0)
    with pytest.raises(Overloaded, match="2 requests wait already: 1 do not fit") as caught:
        house.waiting.join(Someone("c"), 0.0)
    assert caught.value.retry_after_s > 0.0
    assert house.waiting.join(Someone("d", is_resumed=True), 0.0) is not None
    assert len(house.waiting) == 3
    with pytest.raises(WorkerUnavailable, match="no such worker"):
        house.waiting.join(Someone("e", has_worker=False), 0.0)


def test_who_finds_room_need_not_wait_behind_many_for_whom_there_is_no_worker() -> None:
    house = House(room=1)
    for number in range(3 * LOOK_AHEAD):
        seat = house.waiting.join(Someone(f"n{number}", has_worker=False), 0.0)
        assert seat is not None
        assert isinstance(seat.reason, WorkerUnavailable), "each is told why, not only the first"
    assert house.waiting.join(Someone("a"), 0.0) is None


def test_who_is_urgent_is_placed_at_once_before_many_that_do_not_fit() -> None:
    house = House(room=1)
    for number in range(3 * LOOK_AHEAD):
        assert house.waiting.join(Someone(f"n{number}", size=9), 0.0) is not None
    assert house.waiting.join(Someone("a"), 0.0) is not None, "nobody looks that far"
    assert house.waiting.join(Someone("b", priority=-1), 0.0) is None
