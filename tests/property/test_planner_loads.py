"""The planner over random loads, on a fleet of queues in virtual time: bounds, few changes, and an end to them.

There are faults, too: workers die and come back, crash for good, or find no node.
"""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cluster.controller.planner import RoleChange, ScaleDecision
from simulator.queueing_fleet import Moment, OfferedLoad, QueueingFleet, WorkerSpeed
from tests.factories.observed_fleet import autoscaling_config

BOUNDS = {"min_prefill": 1, "max_prefill": 5, "min_decode": 1, "max_decode": 6}
QUICK = WorkerSpeed(start_s=10.0, role_change_s=2.0)


def steps(rates: list[float], each_s: float) -> OfferedLoad:
    return OfferedLoad(lambda at: rates[min(int(at / each_s), len(rates) - 1)], max(*rates, 0.01))


@settings(max_examples=5)
@given(
    rates=st.lists(st.floats(0.0, 30.0), min_size=2, max_size=5),
    num_placeable=st.sampled_from([4, 7, 1000]),
    may_change_roles=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_whatever_comes_the_bounds_hold_and_changes_are_few(
    rates: list[float], num_placeable: int, may_change_roles: bool, seed: int
) -> None:
    config = autoscaling_config(prefill=2, decode=2, may_change_roles=may_change_roles, **BOUNDS)
    fleet, faults = QueueingFleet(config, QUICK, seed, num_placeable), random.Random(seed)
    changed_at: dict[WorkerRole, list[tuple[float, int]]] = {role: [] for role in WorkerRole}

    def check(moment: Moment) -> None:
        for role in WorkerRole:
            low, high = config.worker_bounds(role)
            assert low <= fleet.count(role) <= high, moment.decision.sentence
        match moment.decision.change:
            case ScaleDecision(role, count):
                changed_at[role].append((moment.at, count))
            case RoleChange():
                assert may_change_roles
        if faults.random() < 0.01:
            name = faults.choice(
                [
                    replica.name
                    for replica in fleet.replicas_to_scale()
                    if replica.state is ReplicaState.SERVING
                ]
                or [""]
            )
            if name:
                fleet.kill(name, comes_back_after_s=faults.choice([15.0, None]))

    fleet.play(steps(rates, 300.0), 300.0 * len(rates), check)
    for orders in changed_at.values():
        for (before, _), (after, _) in pairwise(orders):
            assert after - before >= config.autoscaling.grow_cooldown_s


@pytest.mark.parametrize(("rate", "seed"), [(0.5, 1), (3.0, 2), (8.0, 1), (22.0, 1)])
def test_under_a_constant_load_it_settles(rate: float, seed: int) -> None:
    """Once the fleet has its size, the planner may try one worker fewer of each role every hour, when its memory of
    the overload has faded."""
    config = autoscaling_config(**BOUNDS, shrink_after_s=120.0, shrink_cooldown_s=60.0)
    fleet = QueueingFleet(config, QUICK, seed)
    late, missed = Counter[str](), Counter[bool]()

    def note(moment: Moment) -> None:
        if moment.at >= 1800.0:
            missed[moment.report.ttft_s[1] > 2.0 or moment.report.itl_s[1] > 0.05] += 1
            if moment.decision.change is not None:
                late[type(moment.decision.change).__name__] += 1

    fleet.play(steps([rate], 5400.0), 5400.0, note)
    assert late.total() <= 4, fleet.autoscaler.decisions
    assert missed[True] <= 0.1 * missed.total()


@pytest.mark.parametrize("seed", [1, 2])
def test_when_nothing_comes_any_more_the_minimum_is_left(seed: int) -> None:
    config = autoscaling_config(prefill=2, decode=2, **BOUNDS)
    fleet = QueueingFleet(config, QUICK, seed)
    counts: list[tuple[int, int]] = []
    fleet.play(
        steps([25.0, 0.0, 0.0, 0.0], 600.0),
        2400.0,
        lambda moment: counts.append((moment.num_prefill, moment.num_decode)),
    )
    assert max(counts) >= (4, 5)
    assert counts[-1] == (1, 1)


def test_a_dry_run_sees_everything_and_changes_nothing() -> None:
    config = autoscaling_config(**BOUNDS, mode="dry_run")
    fleet = QueueingFleet(config, QUICK, seed=1)
    fleet.play(steps([12.0], 300.0), 300.0)
    assert [replica.name for replica in fleet.replicas_to_scale()] == ["w0", "w1"]
    assert any(sentence.startswith("would do: decode +") for sentence in fleet.autoscaler.decisions)
