"""A worker's drain, by the times at which something happens."""

import pytest

from baton.config import BatonConfig
from cluster.controller.supervisor import Patience
from decode_worker import DecodeRole
from prefill_worker import PrefillRole
from worker.drain import ANSWER_TIMEOUT_S, LEGAL_MOVES, DrainStage, DrainState


def drain_state(is_for_good: bool = True) -> DrainState:
    """Begun at 100, with 5 s for requests and 10 s for leases."""
    return DrainState(None if is_for_good else PrefillRole(1), 100.0, 5.0, 10.0)


@pytest.mark.parametrize("is_for_good", [True, False])
def test_it_is_over_as_soon_as_nothing_is_left(is_for_good: bool) -> None:
    drain = drain_state(is_for_good)
    assert drain.advance(101.0, is_drained=False) is None
    assert drain.advance(102.0, is_drained=True) is DrainStage.OVER
    assert drain.is_clean
    assert drain.advance(103.0, is_drained=True) is None, "it is over once"


def test_requests_are_given_back_and_then_leases_may_end() -> None:
    drain = drain_state()
    assert drain.next_deadline() == 105.0
    assert drain.advance(104.9, is_drained=False) is None
    assert drain.advance(105.0, is_drained=False) is DrainStage.ENDING
    assert drain.next_deadline() == 115.0
    assert drain.advance(114.9, is_drained=False) is None
    assert drain.advance(115.0, is_drained=False) is DrainStage.OVER
    assert not drain.is_clean
    assert drain.next_deadline() is None


def test_after_a_given_up_wait_the_role_is_unchanged() -> None:
    """The engine was busy with one step for longer than the whole change might take."""
    drain, late = drain_state(is_for_good=False), 115.0 + ANSWER_TIMEOUT_S
    assert drain.advance(late, is_drained=True) is DrainStage.ENDING
    assert drain.advance(late, is_drained=True) is DrainStage.OVER
    assert not drain.is_clean
    drain = drain_state(is_for_good=True)
    assert drain.advance(late, is_drained=True) is DrainStage.OVER
    assert drain.is_clean, "a drain takes nothing back"


def test_the_more_urgent_of_two_drains_decides_for_both() -> None:
    drain, hasty = drain_state(), DrainState(None, 101.0, 0.0, 10.0)
    drain.attach(hasty)
    assert drain.advance(101.0, is_drained=False) is DrainStage.ENDING
    assert drain.next_deadline() == 111.0
    assert drain.advance(102.0, is_drained=True) is DrainStage.OVER
    drain.obstacle = "1 blocks are leased"
    drain.report_outcome()
    for each in (drain, hasty):
        assert (each.outcome.result(0), each.obstacle) == (True, "1 blocks are leased")


def test_only_what_leads_to_the_same_role_may_attach() -> None:
    drain, change = drain_state(), drain_state(is_for_good=False)
    back = DrainState(DecodeRole(1), 100.0, 5.0, 10.0)
    assert [drain.may_attach(other) for other in (drain_state(), change, back)] == [True, False, False]
    assert [change.may_attach(other) for other in (drain_state(False), drain, back)] == [True, False, False]
    drain.advance(101.0, is_drained=True)
    assert not drain.may_attach(drain_state()), "it is over"


def test_every_stage_but_the_last_leads_to_the_end() -> None:
    assert all(
        DrainStage.OVER in moves for stage, moves in LEGAL_MOVES.items() if stage is not DrainStage.OVER
    )
    assert LEGAL_MOVES.keys() == set(DrainStage)


def test_the_controller_waits_until_a_worker_has_given_up_its_drain() -> None:
    """This also holds with a short lease, and if the controller hardly waits for other answers."""
    config = BatonConfig.from_mapping(
        {"kv_transfer": {"lease_s": 0.5}, "cluster": {"unresponsive_timeout_s": 1.0}}
    )
    drain = DrainState(PrefillRole(1), 0.0, config.cluster.drain_timeout_s, config.kv_transfer.lease_s)
    assert Patience.of(config).whole_drain_s > drain.abandoned_at + ANSWER_TIMEOUT_S
