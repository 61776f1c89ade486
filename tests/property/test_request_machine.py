"""A request's status: every legal move succeeds, every other asserts and changes nothing, and ends are final."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler import RequestStatus
from scheduler.request import FINISH_REASONS, LEGAL_MOVES
from tests.factories.scheduling import make_request


class RequestMachine(RuleBasedStateMachine):
    """Tries any move from anywhere."""

    @initialize()
    def build(self) -> None:
        self.request = make_request()
        self.expected = RequestStatus.WAITING

    @rule(status=st.sampled_from(RequestStatus))
    def move(self, status: RequestStatus) -> None:
        if status in LEGAL_MOVES.get(self.expected, set()):
            self.request.move_to(status)
            self.expected = status
        else:
            with pytest.raises(AssertionError, match=f"cannot go from {self.expected.name} to {status.name}"):
                self.request.move_to(status)

    @invariant()
    def status_is_what_the_moves_led_to(self) -> None:
        assert self.request.status is self.expected
        assert self.request.is_finished == (self.expected in FINISH_REASONS)
        assert self.request.is_finished == (self.expected not in LEGAL_MOVES)


TestRequest = RequestMachine.TestCase
TestRequest.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


def test_every_status_can_be_reached_and_every_unfinished_one_can_end() -> None:
    frontier = [make_request().status, RequestStatus.WAITING_FOR_FSM]
    reached = {*frontier}
    while frontier:
        for status in LEGAL_MOVES.get(frontier.pop(), set()) - reached:
            reached.add(status)
            frontier.append(status)
    assert reached == set(RequestStatus)
    for moves in LEGAL_MOVES.values():
        assert {
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
            RequestStatus.FINISHED_GIVEN_BACK,
        } <= moves
