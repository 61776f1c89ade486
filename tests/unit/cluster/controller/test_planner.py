"""The planner's decisions, one by one: what is changed, when it is not, and the sentence that says why."""

from dataclasses import replace
from typing import Any

import pytest

from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cluster.controller.observation import Observation
from cluster.controller.planner import NoChange, RoleChange, ScaleDecision
from tests.factories.observed_fleet import autoscaling_config, changes, fleet, look, make_planner, worker

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def test_a_missed_target_must_last_before_a_role_grows() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    looks = look(planner, fleet(1, 2, busy=True, itl_p99_s=0.083), 0.0, 10.0)
    assert [decision.no_change for _, decision in looks] == [NoChange.NOT_YET, NoChange.NOT_YET, None]
    decision = looks[-1][1]
    assert decision.change == ScaleDecision(D, 3)
    assert decision.sentence == (
        "decode +1 (2 -> 3): inter-token latency p99 is 83 ms, above the target of 50 ms for 10 s"
    )


def test_a_target_that_is_met_in_between_starts_the_time_anew() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    slow, quick = fleet(1, 2, busy=True, itl_p99_s=0.083), fleet(1, 2, busy=True, itl_p99_s=0.04)
    looks = [planner.observe(seen, 5.0 * n) for n, seen in enumerate([slow, slow, quick, slow, slow, slow])]
    assert [decision.change is not None for decision in looks] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("observed", "role", "words"),
    [
        ({"itl_p99_s": 0.06}, D, "inter-token latency p99 is 60 ms, above the target of 50 ms"),
        ({"oldest_queued_s": 1.5}, D, "queue time for a decode worker is 1.5 s, above the target of 1 s"),
        ({"ttft_p99_s": 2.5}, P, "time to first token p99 is 2.5 s, above the target of 2 s"),
    ],
)
def test_each_signal_makes_its_own_role_grow(
    observed: dict[str, float], role: WorkerRole, words: str
) -> None:
    planner = make_planner(autoscaling_config())
    decision = look(planner, fleet(1, 1, busy=True, **observed), 0.0, 10.0)[-1][1]
    assert decision.change == ScaleDecision(role, 2)
    assert words in decision.sentence


@pytest.mark.parametrize(
    ("role", "status", "words"),
    [
        (P, {"oldest_waiting_s": 1.2}, "queue time of prompts is 1.2 s, above the target of 1 s"),
        (D, {"blocks_used": 91}, "block use of decode workers is 91 %, above the target of 85 %"),
    ],
)
def test_what_workers_say_of_themselves_makes_their_role_grow(
    role: WorkerRole, status: dict[str, Any], words: str
) -> None:
    planner = make_planner(autoscaling_config())
    other = D if role is P else P
    workers = (worker("w0", role, running=1, **status), worker("w1", other, running=1))
    decision = look(planner, Observation(workers=workers), 0.0, 10.0)[-1][1]
    assert decision.change == ScaleDecision(role, 2)
    assert words in decision.sentence


@pytest.mark.parametrize(
    ("target", "observed"),
    [
        ("target_itl_p99_s", {"itl_p99_s": 9.0}),
        ("target_ttft_p99_s", {"ttft_p99_s": 9.0}),
        ("target_queue_time_s", {"oldest_queued_s": 9.0, "oldest_without_prefill_s": 9.0}),
    ],
)
def test_a_target_that_is_none_is_not_watched(target: str, observed: dict[str, float]) -> None:
    none: dict[str, Any] = {target: None}
    planner = make_planner(autoscaling_config(**none))
    assert changes(look(planner, fleet(1, 1, busy=True, **observed), 0.0, 60.0)) == []


def test_prompts_that_wait_for_room_on_a_decode_worker_need_no_prefill_worker() -> None:
    planner = make_planner(autoscaling_config(max_decode=1))
    seen = fleet(1, 1, busy=True, ttft_p99_s=9.0, oldest_queued_s=1.5)
    assert changes(look(planner, seen, 0.0, 60.0)) == []


def test_a_role_that_is_far_off_gets_half_as_many_again() -> None:
    planner = make_planner(autoscaling_config(decode=3, max_decode=8))
    (first, *_) = changes(look(planner, fleet(1, 3, busy=True, itl_p99_s=0.11), 0.0, 10.0))
    assert first[1] == ScaleDecision(D, 5)


def test_far_off_or_not_the_maximum_holds() -> None:
    planner = make_planner(autoscaling_config(decode=3, max_decode=4))
    (first, *_) = changes(look(planner, fleet(1, 3, busy=True, itl_p99_s=0.5), 0.0, 10.0))
    assert first[1] == ScaleDecision(D, 4)
    full = make_planner(autoscaling_config(decode=4, max_decode=4))
    looks = look(full, fleet(1, 4, busy=True, itl_p99_s=0.5), 0.0, 60.0)
    assert changes(looks) == []
    assert looks[-1][1].no_change is NoChange.AT_MAX
    assert looks[-1][1].sentence.endswith("but 4 is the maximum")


def test_workers_that_are_coming_are_waited_for() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    starting = worker("w3", D, ReplicaState.STARTING)
    seen = fleet(1, 2, busy=True, itl_p99_s=0.083)
    seen = replace(seen, workers=(*seen.workers, starting))
    looks = look(planner, seen, 0.0, 300.0)
    assert changes(looks) == []
    assert looks[-1][1].sentence == (
        "decode stays 3: inter-token latency p99 is 83 ms, above the target of 50 ms for 300 s, but w3 is starting"
    )
    looks = look(planner, fleet(1, 3, busy=True, itl_p99_s=0.083), 305.0, 20.0)
    assert changes(looks) == [(320.0, ScaleDecision(D, 4))], "it has time to show what it does"


def test_after_a_change_it_has_time_to_show() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    looks = look(planner, fleet(1, 2, busy=True, itl_p99_s=0.083), 0.0, 60.0)
    assert [now for now, _ in changes(looks)] == [10.0, 30.0, 50.0]  # not carried out, so decided again
    assert looks[3][1].no_change is NoChange.COOLING


def test_dead_workers_neither_serve_nor_come() -> None:
    planner = make_planner(autoscaling_config(decode=2, max_decode=4))
    seen = fleet(1, 1, busy=True, itl_p99_s=0.083)
    seen = replace(seen, workers=(*seen.workers, worker("w9", D, ReplicaState.CRASH_LOOP)))
    (first, *_) = changes(look(planner, seen, 0.0, 10.0))
    assert first[1] == ScaleDecision(D, 3)


@pytest.mark.parametrize(
    ("dead", "names"),
    [(("w7",), "w7 is"), (("w7", "w8"), "w7 and w8 are"), (("w7", "w8", "w9"), "w7, w8 and w9 are")],
)
def test_a_dead_worker_may_come_back_so_it_counts_against_the_maximum(
    dead: tuple[str, ...], names: str
) -> None:
    count = 1 + len(dead)
    planner = make_planner(autoscaling_config(decode=count, max_decode=count))
    seen = fleet(1, 1, busy=True, itl_p99_s=0.083)
    crashed = [worker(name, D, ReplicaState.CRASH_LOOP) for name in dead]
    looks = look(planner, replace(seen, workers=(*seen.workers, *crashed)), 0.0, 30.0)
    assert changes(looks) == []
    assert looks[-1][1].sentence.endswith(f"but {count} is the maximum, of which {names} not serving")


def test_what_gets_better_by_itself_is_left_alone() -> None:
    planner = make_planner(autoscaling_config())
    decisions = [
        planner.observe(fleet(1, 1, busy=True, oldest_queued_s=20.0 - 1.5 * n), 5.0 * n) for n in range(10)
    ]
    assert [decision.change for decision in decisions] == [None] * 10
    assert decisions[-1].sentence.endswith("for 45 s, but this value falls: it was 9.5 s")


def test_more_prefill_workers_do_not_help_prompts_that_wait_for_none() -> None:
    planner = make_planner(autoscaling_config())
    looks = look(planner, fleet(1, 1, ttft_p99_s=3.0), 0.0, 30.0)
    assert changes(looks) == []
    assert "prefill workers are only 0 % busy" in looks[-1][1].sentence


def test_an_idle_fleet_shrinks_to_its_minimum_and_no_further() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    looks = look(planner, fleet(1, 2), 0.0, 60.0)
    assert changes(looks) == [(60.0, ScaleDecision(D, 1))]
    assert looks[-1][1].sentence == (
        "decode -1 (2 -> 1): all its targets were met with room to spare for 60 s, "
        "and 1 worker would decode 0 tokens/s"
    )
    assert changes(look(make_planner(autoscaling_config()), fleet(1, 1), 0.0, 600.0)) == []


def test_a_target_that_is_nearly_missed_keeps_the_fleet_as_it_is() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    assert changes(look(planner, fleet(1, 2, itl_p99_s=0.045), 0.0, 600.0)) == []


@pytest.mark.parametrize(("num_busy", "goes"), [(2, False), (1, True)])
def test_no_prefill_worker_goes_if_the_others_would_be_busy_most_of_the_time(
    num_busy: int, goes: bool
) -> None:
    planner = make_planner(autoscaling_config(prefill=3))
    workers = [*(worker(f"w{n}", P, running=int(n < num_busy)) for n in range(3)), worker("w3", D, running=1)]
    assert any(changes(look(planner, Observation(workers=tuple(workers)), 0.0, 600.0))) is goes


@pytest.mark.parametrize(("blocks_used", "goes"), [(35, False), (25, True)])
def test_no_decode_worker_goes_if_its_blocks_would_be_missed(blocks_used: int, goes: bool) -> None:
    planner = make_planner(autoscaling_config(decode=2))
    workers = [worker("w0", P), *(worker(f"w{n}", D, blocks_used=blocks_used) for n in (1, 2))]
    assert any(changes(look(planner, Observation(workers=tuple(workers)), 0.0, 600.0))) is goes


@pytest.mark.parametrize(("running", "hours"), [(4, 0.0), (6, 1.0), (9, 2.0)])
def test_a_load_that_was_too_much_is_remembered_and_fades(running: int, hours: float) -> None:
    """Two workers missed the target with 500 tokens/s each, which is 10 requests in steps of 20 ms."""
    planner = make_planner(autoscaling_config(decode=2, target_block_use=None))
    look(planner, fleet(1, 2, busy=True, itl_p99_s=0.083), 0.0, 10.0)
    three = [worker("w0", P), *(worker(f"w{n}", D, running=running) for n in (1, 2, 3))]
    ((at, change), *_) = changes(look(planner, Observation(workers=tuple(three)), 15.0, 10_000.0))
    assert change == ScaleDecision(D, 2)
    assert at == pytest.approx(max(75.0, 10.0 + hours * 3600.0), abs=5.0)


def test_a_load_that_was_too_much_months_ago_limits_nothing() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    look(planner, fleet(1, 2, busy=True, itl_p99_s=0.083), 0.0, 10.0)
    after = 100 * 86_400.0
    assert changes(look(planner, fleet(1, 3, busy=True), after, 60.0)) == [
        (after + 60.0, ScaleDecision(D, 2))
    ]


def test_a_shortage_without_work_sets_no_limit() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    look(planner, fleet(1, 2, oldest_queued_s=9.0), 0.0, 10.0)
    assert changes(look(planner, fleet(1, 3, busy=True), 15.0, 60.0)) == [(75.0, ScaleDecision(D, 2))]


def test_a_worker_whose_speed_is_not_measured_keeps_its_role_from_shrinking() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    workers = worker("w0", P), worker("w1", D), worker("w2", D, running=1, decode_step_s=0.0)
    assert changes(look(planner, Observation(workers=workers), 0.0, 600.0)) == []


def test_a_worker_that_is_silent_keeps_its_role_from_shrinking() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    seen = fleet(1, 2)
    silent = replace(seen, workers=(*seen.workers[:-1], replace(seen.workers[-1], status=None)))
    assert changes(look(planner, silent, 0.0, 600.0)) == []


def test_without_reports_nothing_changes() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    looks = look(planner, None, 0.0, 600.0)
    assert {decision.no_change for _, decision in looks} == {NoChange.NO_REPORT}


@pytest.mark.parametrize(
    "seen", [fleet(1, 2), fleet(1, 2, busy=True, oldest_queued_s=1.5)], ids=["calm", "short"]
)
def test_a_time_without_reports_is_no_time_that_was_observed(seen: Observation) -> None:
    planner = make_planner(autoscaling_config(decode=2))
    look(planner, seen, 0.0, 0.0)
    look(planner, None, 5.0, 300.0)
    assert changes(look(planner, seen, 305.0, 0.0)) == []


def test_a_replica_without_a_node_is_removed_when_it_is_not_needed() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    seen = fleet(1, 1)
    seen = replace(seen, workers=(*seen.workers, worker("w7", D, ReplicaState.PLACING)))
    looks = look(planner, seen, 0.0, 60.0)
    assert changes(looks) == [(60.0, ScaleDecision(D, 1))]
    assert looks[-1][1].sentence.endswith("for 60 s without w7 (placing)")


def test_a_replica_that_has_only_just_died_is_not_removed() -> None:
    planner = make_planner(autoscaling_config(decode=2))
    whole = fleet(1, 2)
    *others, last = whole.workers
    dead = replace(last, replica=replace(last.replica, state=ReplicaState.BACKING_OFF))
    look(planner, whole, 0.0, 55.0)
    looks = look(planner, replace(whole, workers=(*others, dead)), 60.0, 60.0)
    assert changes(looks) == [(120.0, ScaleDecision(D, 1))], "it was away for as long as a role must be calm"


def test_a_role_that_is_short_gets_a_spare_worker_of_the_other() -> None:
    planner = make_planner(autoscaling_config(prefill=2, decode=2))
    workers = [
        worker("w0", P, running=0),
        worker("w1", P, running=0),
        *(worker(f"w{n}", D, running=10) for n in (2, 3)),
    ]
    (first,) = changes(look(planner, Observation(workers=tuple(workers), itl_p99_s=0.083), 0.0, 10.0))
    assert first[1] == RoleChange("w0", D)


def test_the_sentence_of_a_role_change_says_what_it_costs_the_other_role() -> None:
    planner = make_planner(autoscaling_config(prefill=2, decode=2))
    seen = fleet(2, 2, itl_p99_s=0.083)
    assert look(planner, seen, 0.0, 10.0)[-1][1].sentence == (
        "w0 prefill -> decode (prefill 2 -> 1, decode 2 -> 3): inter-token latency p99 is 83 ms, above the target of "
        "50 ms for 10 s, and 1 worker would be 0 % busy"
    )


@pytest.mark.parametrize(
    ("prefill", "busy", "config"),
    [
        (2, True, {}),  # both prefill workers have enough to do
        (1, False, {}),  # the last one
        (2, False, {"may_change_roles": False}),
    ],
)
def test_a_role_without_a_spare_worker_gives_none(prefill: int, busy: bool, config: dict[str, bool]) -> None:
    planner = make_planner(autoscaling_config(prefill=prefill, decode=2, **config))
    (first,) = changes(look(planner, fleet(prefill, 2, busy=busy, itl_p99_s=0.083), 0.0, 10.0))
    assert first[1] == ScaleDecision(D, 3)


def test_a_worker_takes_the_place_of_one_that_no_node_has_room_for() -> None:
    planner = make_planner(autoscaling_config(prefill=2, decode=2, max_decode=3))
    busy = replace(fleet(2, 2, busy=True, itl_p99_s=0.083))
    placing = worker("w4", D, ReplicaState.PLACING)
    assert changes(look(planner, busy, 0.0, 10.0)) == [(10.0, ScaleDecision(D, 3))]
    crowded = replace(busy, workers=(*busy.workers, placing))
    assert changes(look(planner, crowded, 15.0, 15.0)) == []
    idle_prefill = replace(fleet(2, 2, itl_p99_s=0.083))
    looks = look(planner, replace(idle_prefill, workers=(*idle_prefill.workers, placing)), 35.0, 20.0)
    assert changes(looks)[0][1] == RoleChange("w0", D, replaces_unplaced=True)
    assert "no node has room for a new worker" in next(d.sentence for _, d in looks if d.change)


def test_a_role_change_that_was_refused_is_not_asked_for_again_at_once() -> None:
    planner = make_planner(autoscaling_config(prefill=2, decode=2))
    (first,) = changes(look(planner, fleet(2, 2, itl_p99_s=0.083), 0.0, 10.0))
    planner.refused(first[1], 25.0)
    (second, *_) = changes(look(planner, fleet(2, 2, itl_p99_s=0.083), 30.0, 30.0))
    assert second[1] == ScaleDecision(D, 3)


@pytest.mark.parametrize(("decode", "count"), [(0, 1), (6, 4)])
def test_whatever_others_did_to_the_fleet_the_bounds_hold(decode: int, count: int) -> None:
    planner = make_planner(autoscaling_config())
    decision = planner.observe(fleet(1, decode), 0.0)
    assert decision.change == ScaleDecision(D, count)


def test_a_worker_that_begins_anew_is_not_replaced_and_counts_towards_the_bounds() -> None:
    planner = make_planner(autoscaling_config())
    begins_anew = worker("w9", D, ReplicaState.DRAINING)
    assert changes(look(planner, Observation(workers=(worker("w0", P), begins_anew)), 0.0, 60.0)) == []
    crowded = fleet(1, 4)
    crowded = replace(crowded, workers=(*crowded.workers, begins_anew))
    assert changes(look(planner, crowded, 65.0, 0.0)) == [(65.0, ScaleDecision(D, 4))]


@pytest.mark.parametrize(("may_change_roles", "expected"), [(True, []), (False, [ScaleDecision(P, 1)])])
def test_a_spare_worker_is_kept_for_a_role_that_has_just_become_short(
    may_change_roles: bool, expected: list[ScaleDecision]
) -> None:
    planner = make_planner(autoscaling_config(prefill=2, may_change_roles=may_change_roles))
    look(planner, fleet(2, 1, itl_p99_s=0.045), 0.0, 55.0)
    assert [
        change for _, change in changes(look(planner, fleet(2, 1, itl_p99_s=0.06), 60.0, 5.0))
    ] == expected


def test_the_spare_worker_goes_to_the_role_that_it_was_kept_for() -> None:
    planner = make_planner(autoscaling_config(prefill=2))
    look(planner, fleet(2, 1, itl_p99_s=0.045), 0.0, 55.0)
    assert changes(look(planner, fleet(2, 1, itl_p99_s=0.06), 60.0, 10.0)) == [(70.0, RoleChange("w0", D))]


def test_a_spare_worker_is_not_kept_for_a_role_that_has_as_many_as_it_may() -> None:
    planner = make_planner(autoscaling_config(prefill=2, max_decode=1))
    ((at, change),) = changes(look(planner, fleet(2, 1, itl_p99_s=0.06), 0.0, 60.0))
    assert (at, change) == (60.0, ScaleDecision(P, 1))


def test_few_slow_first_tokens_are_no_time_with_room_to_spare() -> None:
    """Such first tokens are no shortage of prefill workers, either."""
    planner = make_planner(autoscaling_config(prefill=2))
    assert changes(look(planner, fleet(2, 1, slowest_ttft_s=3.0), 0.0, 600.0)) == []
    assert changes(look(planner, fleet(2, 1, slowest_ttft_s=1.5), 605.0, 60.0)) == [
        (665.0, ScaleDecision(P, 1))
    ]
    decode = make_planner(autoscaling_config(decode=2))
    assert changes(look(decode, fleet(1, 2, slowest_ttft_s=3.0), 0.0, 60.0)) == [(60.0, ScaleDecision(D, 1))]


def test_a_dry_run_asks_once_to_be_back_in_its_bounds_and_goes_on() -> None:
    planner = make_planner(autoscaling_config(mode="dry_run", max_decode=3, may_change_roles=False))
    crowded = fleet(1, 4, busy=True, ttft_p99_s=9.0)
    assert changes(look(planner, crowded, 0.0, 15.0)) == [
        (0.0, ScaleDecision(D, 3)),
        (10.0, ScaleDecision(P, 2)),
    ]
    look(planner, fleet(1, 3, busy=True), 20.0, 0.0)
    assert changes(look(planner, crowded, 25.0, 5.0)) == [(25.0, ScaleDecision(D, 3))]
