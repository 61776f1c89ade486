"""The planner and a fleet that has no prefill worker at present, but may have some: it gets one when prompts wait."""

from typing import Any

import pytest

from baton.fleet import ReplicaState
from baton.worker import WorkerRole
from cluster.controller.observation import Observation
from cluster.controller.planner import ScaleDecision
from tests.factories.observed_fleet import autoscaling_config, changes, fleet, look, make_planner, worker

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
GROWS_PREFILL = [(10.0, ScaleDecision(P, 1))]


def decode_workers(observed: dict[str, float] | None = None, **status: Any) -> Observation:
    workers = tuple(worker(f"d{index}", D, running=10, **status) for index in range(2))
    return Observation(workers=workers, **(observed or {}))


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (decode_workers(oldest_waiting_s=1.5), "queue time of prompts is 1.5 s, above the target of 1 s"),
        (decode_workers({"ttft_p99_s": 3.0}), "time to first token p99 is 3 s, above the target of 2 s"),
        (
            decode_workers({"oldest_without_prefill_s": 30.0}),
            "queue time for a prefill worker is 30 s, above the target of 1 s",
        ),
    ],
)
def test_a_fleet_without_prefill_workers_gets_one_when_prompts_wait(seen: Observation, words: str) -> None:
    planner = make_planner(autoscaling_config(prefill=0, decode=2, min_decode=2))
    looks = look(planner, seen, 0.0, 10.0)
    assert changes(looks) == GROWS_PREFILL
    assert words in looks[-1][1].sentence


def test_while_the_first_prefill_worker_starts_no_other_is_started() -> None:
    planner = make_planner(autoscaling_config(prefill=0, decode=2, min_decode=2))
    seen = decode_workers(oldest_waiting_s=1.5)
    starting = Observation(workers=(*seen.workers, worker("p0", P, ReplicaState.STARTING)))
    looks = look(planner, starting, 0.0, 300.0)
    assert changes(looks) == []
    assert looks[-1][1].sentence.endswith("but p0 is starting")


def test_once_a_prefill_worker_serves_only_its_own_queue_is_the_queue_of_prompts() -> None:
    planner = make_planner(autoscaling_config(prefill=1, decode=2, min_decode=2))
    seen = decode_workers(oldest_waiting_s=1.5)
    mixed = Observation(workers=(*seen.workers, worker("p0", P)))
    assert changes(look(planner, mixed, 0.0, 600.0)) == []
    two = Observation(workers=(*mixed.workers, worker("p1", P)))
    assert changes(look(planner, two, 605.0, 60.0)) == [(665.0, ScaleDecision(P, 1))]


def test_a_fleet_that_may_have_no_prefill_worker_grows_decode_and_says_nothing_of_prefill() -> None:
    planner = make_planner(autoscaling_config(prefill=0, decode=2, max_prefill=0))
    seen = decode_workers({"oldest_without_prefill_s": 30.0}, oldest_waiting_s=1.5)
    looks = look(planner, seen, 0.0, 10.0)
    assert changes(looks) == [(10.0, ScaleDecision(D, 3))]
    assert looks[0][1].sentence.startswith("decode stays 2: queue time of prompts is 1.5 s")


def test_the_last_prefill_worker_stays_while_prompts_wait_at_decode_workers() -> None:
    """Without this worker, the wait would be a reason to start it again."""
    config = autoscaling_config(prefill=1, decode=2, min_prefill=0, min_decode=2)
    calm, waiting = decode_workers(), decode_workers(oldest_waiting_s=0.9)
    idle = worker("p0", P)
    planner = make_planner(config)
    assert changes(look(planner, Observation(workers=(*waiting.workers, idle)), 0.0, 600.0)) == []
    looks = look(planner, Observation(workers=(*calm.workers, idle)), 605.0, 60.0)
    assert changes(looks) == [(665.0, ScaleDecision(P, 0))]


def test_prefill_that_shrank_to_none_comes_back_and_goes_no_more_often_than_the_load_does() -> None:
    """Prompts wait from 600 s to 900 s."""
    planner = make_planner(
        autoscaling_config(prefill=1, decode=2, min_prefill=0, min_decode=2, target_ttft_p99_s=None)
    )
    count, seen = 1, []
    for now in range(0, 1800, 5):
        is_loaded = 600 <= now < 900
        waits = is_loaded and not count
        workers = [worker(f"d{n}", D, running=10, oldest_waiting_s=1.5 * waits) for n in range(2)]
        workers += [worker(f"p{n}", P, running=int(is_loaded)) for n in range(count)]
        decision = planner.observe(Observation(workers=tuple(workers)), float(now))
        if isinstance(decision.change, ScaleDecision):
            count = decision.change.count
            seen.append((now, count))
    assert seen == [(60, 0), (610, 1), (960, 0)]


def test_an_idle_fleet_without_prefill_workers_stays_as_it_is() -> None:
    planner = make_planner(autoscaling_config(prefill=0, decode=1))
    assert changes(look(planner, fleet(0, 1), 0.0, 600.0)) == []
