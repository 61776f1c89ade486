"""The line is fair: nobody starves, room is never left while someone waits for it, and callers' shares are bounded."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import RequestError
from gateway.requests.waiting import LOOK_AHEAD, MAX_PASSED, Seat, WaitingRoom
from gateway.routing.placement import NoRoom

MAX_TOKENS = 50

CALLERS = st.sampled_from("abcd")
TOKENS = st.integers(1, MAX_TOKENS)


@dataclass(eq=False)
class Request:
    caller: str
    num_tokens: int
    size: int = 1
    priority: int = 0
    is_resumed: bool = False

    def time_to_begin(self, now: float) -> float | None:
        return None

    def needs(self) -> object:
        return None


class Room:
    def __init__(self) -> None:
        self.free = 0
        self.placed: list[Request] = []
        self.line = WaitingRoom[Request](10**6, self.place, self.turn_away)

    def place(self, request: Request) -> RequestError | None:
        if request.size > self.free:
            return NoRoom("full")
        self.free -= request.size
        self.placed.append(request)
        return None

    def turn_away(self, request: Request, error: RequestError) -> None:
        raise AssertionError(f"{request}: {error}")


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
    seats: list[Seat[Request]] = []
    for caller, num_tokens in backlog:
        seat = room.line.join(Request(caller, num_tokens), 0.0)
        assert seat is not None
        seats.append(seat)
        waiting[caller] += 1
    for number in sorted(leavers):
        if number < len(seats):
            room.line.leave(seats[number], 0.0)
            waiting[seats[number].caller] -= 1
    served = Counter[str]()
    for _ in range(num_served):
        busy = [caller for caller, count in waiting.items() if count]
        if not busy:
            break
        room.free = 1
        room.line.sweep(0.0)
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
            st.builds(Request, CALLERS, TOKENS, st.integers(1, 4), st.integers(0, 1), st.booleans()),
            st.integers(1, 6),
        ),
        max_size=150,
    )
)
@settings(deadline=None)
def test_room_is_not_left_while_one_in_sight_would_fit(steps: list[Request | int]) -> None:
    room = Room()
    num_joined = 0
    for step in steps:
        if isinstance(step, Request):
            room.line.join(step, 0.0)
            num_joined += 1
        else:
            room.free += step
            room.line.sweep(0.0)
        assert len(room.line) + len(room.placed) == num_joined
        for seat in list(room.line._line)[:LOOK_AHEAD]:
            if seat.num_passed >= MAX_PASSED:
                break
            assert seat.traveller.size > room.free


@given(stream=st.lists(st.tuples(CALLERS, TOKENS, st.integers(1, 2)), min_size=600, max_size=600))
@settings(max_examples=15, deadline=None)
def test_nobody_starves(stream: list[tuple[str, int, int]]) -> None:
    """A large one gets its room, though smaller ones of everybody keep coming, and each finds some."""
    room = Room()
    room.line.join(Request("a", MAX_TOKENS, size=3), 0.0)
    large = next(iter(room.line._line)).traveller
    for caller, num_tokens, made in stream:
        room.line.join(Request(caller, num_tokens), 0.0)
        room.free += made
        room.line.sweep(0.0)
        if large in room.placed:
            return
    raise AssertionError("it was never placed")
