"""When a dead worker is started again, and which ways a replica may go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import ClusterConfig
from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cluster.controller.replica import MOVES, Replica, Restarts

CONFIG = ClusterConfig(
    restart_delay_s=1.0,
    restart_delay_max_s=30.0,
    crash_loop_deaths=5,
    crash_loop_window_s=100.0,
    stable_after_s=10.0,
)


def test_a_worker_that_served_well_is_replaced_at_once() -> None:
    assert Restarts(CONFIG).died(now=50.0, served_s=20.0) == (ReplicaState.BACKING_OFF, 0.0)


def test_each_early_death_doubles_the_wait() -> None:
    restarts = Restarts(CONFIG)
    waits = [restarts.died(now, 0.0)[1] for now in (0.0, 40.0, 80.0, 120.0)]
    assert waits == [0.0, 1.0, 2.0, 4.0]


def test_many_deaths_in_a_short_time_are_a_crash_loop_until_an_incarnation_lasts() -> None:
    restarts = Restarts(CONFIG)
    states = [restarts.died(float(now), 1.0)[0] for now in range(5)]
    assert states == [ReplicaState.BACKING_OFF] * 4 + [ReplicaState.CRASH_LOOP]
    assert restarts.died(200.0, 9.9) == (ReplicaState.CRASH_LOOP, 30.0)  # however rare they are by now
    assert restarts.died(300.0, 10.0) == (ReplicaState.BACKING_OFF, 0.0)


def test_the_death_of_a_worker_that_served_well_is_no_early_death() -> None:
    restarts = Restarts(CONFIG)
    assert restarts.died(20.0, 20.0) == (ReplicaState.BACKING_OFF, 0.0)
    early = [restarts.died(21.0 + number, 0.0) for number in range(5)]
    assert early == [
        *((ReplicaState.BACKING_OFF, wait) for wait in (0.0, 1.0, 2.0, 4.0)),
        (ReplicaState.CRASH_LOOP, 30.0),
    ]


def test_rare_early_deaths_are_no_crash_loop_but_wait_longer_and_longer() -> None:
    restarts = Restarts(CONFIG)
    results = [restarts.died(now * 1000.0, 0.0) for now in range(9)]
    assert {state for state, _ in results} == {ReplicaState.BACKING_OFF}
    assert results[-1][1] == 30.0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), max_size=40))
def test_waits_are_bounded_and_a_crash_loop_has_had_its_deaths(
    incarnations: list[tuple[float, float]],
) -> None:
    restarts, now, short = Restarts(CONFIG), 0.0, 0
    for pause, served_s in incarnations:
        now += pause + served_s
        short = 0 if served_s >= CONFIG.stable_after_s else short + 1
        state, delay_s = restarts.died(now, served_s)
        assert 0.0 <= delay_s <= CONFIG.restart_delay_max_s
        assert (delay_s == 0.0) == (short <= 1)
        if state is ReplicaState.CRASH_LOOP:
            assert short >= CONFIG.crash_loop_deaths


@given(st.lists(st.sampled_from(ReplicaState)))
def test_a_replica_moves_only_as_the_table_says(wishes: list[ReplicaState]) -> None:
    replica = Replica("w0", WorkerRole.DECODE, Restarts(CONFIG))
    for wish in wishes:
        replica.node = "here"
        if wish in MOVES[replica.state]:
            replica.move(wish)
            assert replica.state is wish
            assert (replica.node == "here") == (
                wish in (ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.DRAINING)
            )
        else:
            with pytest.raises(AssertionError):
                replica.move(wish)


def test_a_description_counts_down_to_the_next_start() -> None:
    replica = Replica("w0", WorkerRole.DECODE, Restarts(CONFIG))
    replica.died(10.0, 0.0, "first")
    replica.move(ReplicaState.PLACING)
    assert replica.describe(10.0).next_start_in_s is None
    replica.died(11.0, 0.0, "second")
    description = replica.describe(11.25)
    assert (description.next_start_in_s, description.last_failure) == (0.75, "second")
    assert description.state is ReplicaState.BACKING_OFF
