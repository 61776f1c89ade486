"""Behaviour 20: a victim's blocks go to host memory and come back, where that is allowed, possible and worth it."""

from typing import Any

import pytest

from baton.kv import TransferRole
from scheduler import RequestStatus
from scheduler.swap import SwapSpace
from tests.factories.driving import Driver
from tests.factories.scheduling import FakeConnector, FakeRunner, make_request, make_scheduler, token_at


def make_driver(num_ahead: int = 0, **settings: Any) -> Driver:
    defaults = {"preemption": "swap", "num_swap_blocks": 8, "num_blocks": 5}
    return Driver(make_scheduler(**defaults | settings), num_ahead=num_ahead)


def run_until_preemption(driver: Driver) -> Any:
    while not (plan := driver.step()).preempted_req_ids:
        pass
    return plan


def test_a_scheduler_that_swaps_has_host_blocks() -> None:
    """Without host blocks, the scheduler would recompute every victim, and nobody would notice this."""
    with pytest.raises(AssertionError, match="swap space"):
        make_driver(num_swap_blocks=None)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_c20_a_victim_goes_on_where_it_stood_with_the_same_tokens(
    num_ahead: int, enable_prefix_caching: bool
) -> None:
    driver = make_driver(num_ahead, enable_prefix_caching=enable_prefix_caching)
    old, young = make_request(32, max_tokens=3), make_request(31, max_tokens=20)
    driver.add(old, young)
    plan = run_until_preemption(driver)
    assert [host for _, host in plan.swap_out] == [*young.swapped_block_ids]
    assert len(young.swapped_block_ids) == 2
    num_computed = young.num_computed_tokens
    assert num_computed >= 31
    resumed = driver.step()
    while young.request_id not in resumed.num_scheduled_tokens:
        resumed = driver.step()
    index = resumed.scheduled_cached_reqs.request_ids.index(young.request_id)
    assert resumed.scheduled_cached_reqs.num_computed_tokens[index] == num_computed
    assert resumed.num_scheduled_tokens[young.request_id] == 1, "nothing is computed again"
    assert driver.run_to_end()[young.request_id] == [token_at(young.request_id, at) for at in range(20)]
    assert driver.scheduler.counters()["swap_preemptions"] >= 1


def test_c20_blocks_that_the_prefix_cache_still_has_are_not_copied_back() -> None:
    driver = make_driver(num_blocks=6)
    old, young = make_request(47, max_tokens=3), make_request(31, max_tokens=20)
    driver.add(old, young)
    assert len(run_until_preemption(driver).swap_out) == 2
    driver.run_to_end()
    counters = driver.scheduler.counters()
    assert counters["swapped_in_blocks"] < counters["swapped_out_blocks"]


def test_c20_a_producer_whose_token_is_under_way_is_not_swapped_out_and_samples_it_again() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, preemption="swap", num_swap_blocks=8, num_blocks=5)
    driver = Driver(scheduler, FakeRunner(memory=connector.memory), 1, connector)
    producer = make_request(31, role=TransferRole.PRODUCER)
    driver.add(make_request(32, max_tokens=3), producer)
    plan = run_until_preemption(driver)
    assert plan.preempted_req_ids == {producer.request_id}
    assert not plan.swap_out
    assert driver.run_to_end(max_steps=20)[producer.request_id] == [token_at(producer.request_id, 0)]
    assert producer.status is RequestStatus.FINISHED_HANDED_OVER


def test_c20_what_a_token_under_way_will_end_is_not_swapped_out() -> None:
    driver = make_driver(num_ahead=1, num_blocks=7, enable_prefix_caching=False)
    driver.add(make_request(47, max_tokens=20), ending := make_request(47, max_tokens=2))
    plan = run_until_preemption(driver)
    assert plan.preempted_req_ids == {ending.request_id}
    assert plan.swap_out == ()
    assert len(driver.run_to_end()[ending.request_id]) == 2


def test_c20_a_full_host_pool_means_recompute() -> None:
    driver = make_driver(num_swap_blocks=1)
    driver.add(make_request(32, max_tokens=3), make_request(31, max_tokens=20))
    assert run_until_preemption(driver).swap_out == ()
    driver.run_to_end()
    assert "swap_preemptions" not in driver.scheduler.counters()


def test_c20_host_blocks_that_were_copied_back_serve_the_next_victim() -> None:
    driver = make_driver(num_swap_blocks=2)
    for _ in range(2):
        driver.add(make_request(32, max_tokens=3), make_request(31, max_tokens=20))
        assert len(run_until_preemption(driver).swap_out) == 2
        driver.run_to_end()


def test_c20_an_abort_gives_the_host_blocks_back() -> None:
    driver = make_driver()
    old, young = make_request(32, max_tokens=9), make_request(31, max_tokens=20)
    driver.add(old, young)
    run_until_preemption(driver)
    assert driver.scheduler.kv_block_counts().host_used == 2
    news = driver.scheduler.finish_requests([young.request_id], RequestStatus.FINISHED_ABORTED)
    driver.note(news["client"])
    assert driver.scheduler.kv_block_counts().host_used == 0
    driver.run_to_end()


def test_c25_a_forced_reset_gives_up_what_was_swapped_out_too() -> None:
    driver = make_driver()
    old, young = make_request(32, max_tokens=9), make_request(31, max_tokens=20)
    driver.add(old, young)
    run_until_preemption(driver)
    assert driver.scheduler.reset_prefix_cache(force=True)
    assert (young.num_computed_tokens, young.swapped_block_ids) == (0, ())
    plan = driver.step()
    assert plan.swap_in == ()
    assert plan.num_scheduled_tokens[old.request_id] == old.num_tokens - 1
    driver.run_to_end()


def test_a_host_block_that_a_step_reads_is_not_written_by_the_same_step() -> None:
    swap = SwapSpace(2)
    one, two = make_request(), make_request()
    swap.swap_out(one, (7, 8))
    assert swap.num_free == 0
    assert [block for _, block in swap.swap_in(one, (3, 4), num_hit_blocks=1)] == [4]
    assert swap.num_free == 0
    swap.begin_step()
    assert len(swap.swap_out(two, (5, 6))) == 2
    swap.check_integrity()
