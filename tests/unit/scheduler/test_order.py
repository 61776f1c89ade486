"""Which request comes first: arrival or priority, ageing, and the queue in which each request keeps its place."""

import pytest
from pydantic import ValidationError

from baton.kv import TransferRole
from scheduler.order import FCFS, MAX_FUTILE_PREEMPTIONS, Order, Priority
from tests.factories.driving import Driver
from tests.factories.scheduling import make_config, make_request, make_scheduler


def test_priority_ties_go_by_arrival_and_then_by_id() -> None:
    driver = Driver(make_scheduler(policy="priority"))
    driver.add(
        make_request(request_id="c", priority=1, arrival_time=2.0),
        make_request(request_id="b", priority=1, arrival_time=1.0),
        make_request(request_id="a", priority=1, arrival_time=2.0),
        make_request(request_id="z", priority=0, arrival_time=9.0),
    )
    assert list(driver.step().num_scheduled_tokens) == ["z", "b", "a", "c"]


def test_ageing_lets_a_request_be_overtaken_only_by_those_that_come_soon_after_it() -> None:
    driver = Driver(make_scheduler(policy="priority", priority_ageing_s=10.0, max_num_seqs=1))
    poor = make_request(request_id="poor", priority=3, arrival_time=0.0, max_tokens=1)
    soon = make_request(request_id="soon", priority=1, arrival_time=15.0, max_tokens=1)
    late = make_request(request_id="late", priority=1, arrival_time=25.0, max_tokens=1)
    driver.add(late, poor, soon)
    assert [next(iter(driver.step().num_scheduled_tokens)) for _ in range(3)] == ["soon", "poor", "late"]


def test_requests_of_equal_age_go_by_arrival() -> None:
    driver = Driver(make_scheduler(policy="priority", priority_ageing_s=10.0))
    driver.add(
        make_request(request_id="a", priority=0, arrival_time=20.0),
        make_request(request_id="b", priority=1, arrival_time=10.0),
        make_request(request_id="c", priority=2, arrival_time=0.0),
    )
    assert list(driver.step().num_scheduled_tokens) == ["c", "b", "a"]


def test_without_ageing_a_stream_of_better_requests_starves_the_worst_and_with_it_does_not() -> None:
    def steps_until_served(ageing_s: float) -> int:
        settings = {"policy": "priority", "priority_ageing_s": ageing_s, "max_num_seqs": 1}
        driver = Driver(make_scheduler(**settings))
        poor = make_request(priority=5, arrival_time=0.0, max_tokens=1)
        driver.add(poor)
        for step in range(1, 100):
            driver.add(make_request(priority=0, arrival_time=float(step), max_tokens=1))
            if poor.request_id in driver.step().num_scheduled_tokens:
                return step
        return 100

    assert steps_until_served(0.0) == 100
    assert steps_until_served(4.0) == 20


def test_the_victim_is_the_youngest_or_the_worst() -> None:
    def victims(order: Order) -> list[int]:
        for request in running:
            request.queue_key = order.key_of_new(request)
        return [running.index(request) for request in order.victims(running)]

    running = [
        make_request(priority=1, arrival_time=1.0),
        make_request(priority=2, arrival_time=0.0),
        make_request(priority=2, arrival_time=0.0),
        make_request(priority=0, arrival_time=5.0),
    ]
    assert victims(FCFS()) == [3, 2, 1, 0]
    assert victims(Priority()) == [1, 2, 0, 3]
    assert victims(Priority(ageing_s=0.5)) == [3, 0, 1, 2], (
        "the others have waited ten steps of priority longer"
    )


def test_a_prompt_does_not_age_by_steps_without_tokens() -> None:
    order = FCFS()
    first = order.key_of_new(make_request(50, role=TransferRole.PRODUCER))
    order.planned(0)
    assert order.key_of_new(make_request(49, role=TransferRole.PRODUCER)) < first


def test_equals_do_not_preempt_each_other_in_turn_for_ever() -> None:
    settings = {"policy": "priority", "num_blocks": 7, "long_prefill_token_threshold": 16}
    driver = Driver(make_scheduler(**settings, enable_prefix_caching=False))
    driver.add(*(make_request(47, max_tokens=40) for _ in range(2)))
    driver.run_to_end(max_steps=1_000)
    assert driver.scheduler.counters()["preemptions"] > MAX_FUTILE_PREEMPTIONS


def test_among_equals_requests_without_progress_are_spared() -> None:
    first, second = make_request(request_id="a"), make_request(request_id="b")
    order = Priority()
    for request in (first, second):
        request.queue_key = order.key_of_new(request)
    for victim, other in ((first, second), (second, first)):
        assert list(order.victims([first, second])) == [victim, other]
        for _ in range(MAX_FUTILE_PREEMPTIONS + 1):
            victim.count_preemption()
    assert list(order.victims([first, second])) == [second, first], (
        "the last by id, so that the other gets on"
    )
    first.all_token_ids.append(7)
    first.count_preemption()
    assert list(order.victims([first, second])) == [first, second], "it got on, so it can give way again"


def test_ageing_without_priorities_would_do_nothing_and_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"priority_ageing_s \(5.0\) needs policy 'priority'"):
        make_config(priority_ageing_s=5.0)
