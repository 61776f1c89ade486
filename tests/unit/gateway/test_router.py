"""The router: who gets a request, and who never does."""

import pytest

from baton.errors import WorkerUnavailable
from gateway.router import Candidate, Mode, Placement, Router

P = [Candidate("p0", 0), Candidate("p1", 0)]
D = [Candidate("d0", 0), Candidate("d1", 0)]


def test_round_robin_takes_turns() -> None:
    router = Router("round_robin", Mode.DISAGGREGATED)
    assert [router.route(P, D).decode for _ in range(4)] == ["d0", "d1", "d0", "d1"]


def test_least_loaded_takes_the_emptiest_and_ties_take_turns() -> None:
    router = Router("least_loaded", Mode.LOCAL)
    busy = [Candidate("d0", 3), Candidate("d1", 1), Candidate("d2", 1)]
    assert {router.route([], busy).decode for _ in range(6)} == {"d1", "d2"}


def test_a_request_may_ask_for_another_mode_than_the_default() -> None:
    router = Router("round_robin", Mode.DISAGGREGATED)
    assert router.route(P, D, Mode.LOCAL) == Placement(Mode.LOCAL, None, "d0")
    assert Router("round_robin", Mode.LOCAL).route(P, D, Mode.DISAGGREGATED).prefill == "p0"


def test_c53_without_prefill_workers_a_default_falls_back_visibly_and_a_demand_fails() -> None:
    router = Router("round_robin", Mode.DISAGGREGATED)
    assert router.route([], D) == Placement(Mode.LOCAL, None, "d0", is_fallback=True)
    with pytest.raises(WorkerUnavailable, match="requires one"):
        router.route([], D, Mode.DISAGGREGATED)


def test_excluded_workers_are_not_asked_again() -> None:
    router = Router("least_loaded", Mode.DISAGGREGATED)
    for _ in range(4):
        assert router.route(P, D, excluded={"p0", "d1"}) == Placement(Mode.DISAGGREGATED, "p1", "d0")
    with pytest.raises(WorkerUnavailable, match="no decode worker"):
        router.route(P, D, excluded={"d0", "d1"})
