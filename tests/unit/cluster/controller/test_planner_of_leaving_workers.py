"""Workers that leave for good: they count towards the maximum, and their role loses no other one meanwhile."""

from dataclasses import replace

import pytest

from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cluster.controller.observation import Observation, ObservedWorker
from cluster.controller.planner import ScaleDecision
from tests.factories.observed_fleet import autoscaling_config, changes, fleet, look, make_planner, worker

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def leaving(name: str, role: WorkerRole) -> ObservedWorker:
    """A worker that drains for good."""
    return replace(worker(name, role, ReplicaState.DRAINING), is_leaving=True)


def with_leaving(seen: Observation, role: WorkerRole) -> Observation:
    return replace(seen, workers=(*seen.workers, leaving("w9", role)))


def test_a_role_grows_while_one_of_its_workers_leaves() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    seen = with_leaving(fleet(1, 2, busy=True, itl_p99_s=0.083), D)
    looks = look(planner, seen, 0.0, 10.0)
    assert looks[-1][1].change == ScaleDecision(D, 3)
    assert looks[-1][1].sentence.startswith("decode +1 (2 -> 3): ")


def test_a_worker_that_leaves_counts_against_the_maximum_until_it_has_ended() -> None:
    planner = make_planner(autoscaling_config(decode=2, max_decode=3))
    short = fleet(1, 2, busy=True, itl_p99_s=0.5)
    looks = look(planner, with_leaving(short, D), 0.0, 30.0)
    assert changes(looks) == []
    assert looks[-1][1].sentence.endswith("but 3 is the maximum, of which w9 is not serving")
    assert changes(look(planner, short, 35.0, 0.0)) == [(35.0, ScaleDecision(D, 3))]


@pytest.mark.parametrize(("max_decode", "expected"), [(2, []), (3, [(0.0, ScaleDecision(D, 2))])])
def test_a_role_below_its_minimum_grows_at_once_as_far_as_those_that_leave_have_room(
    max_decode: int, expected: list[tuple[float, ScaleDecision]]
) -> None:
    planner = make_planner(autoscaling_config(decode=2, min_decode=2, max_decode=max_decode))
    assert changes(look(planner, with_leaving(fleet(1, 1, busy=True), D), 0.0, 0.0)) == expected


def test_a_role_loses_the_next_worker_only_some_time_after_the_last_one_has_left() -> None:
    planner = make_planner(autoscaling_config(decode=3))
    calm = fleet(1, 3)
    assert changes(look(planner, with_leaving(calm, D), 0.0, 600.0)) == []
    assert changes(look(planner, calm, 605.0, 35.0)) == [(640.0, ScaleDecision(D, 2))]


def test_a_role_that_loses_a_worker_gives_no_other_one_to_the_other_role() -> None:
    planner = make_planner(autoscaling_config(prefill=2, decode=2))
    short = fleet(2, 2, itl_p99_s=0.083)
    ((_, change),) = changes(look(planner, with_leaving(short, P), 0.0, 10.0))
    assert change == ScaleDecision(D, 3)
