"""Behaviour 63 in the scheduler: a request that does not read the prefix cache still fills it."""

import pytest

from baton.kv import TransferRole
from scheduler import RequestStatus
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    flatten,
    make_request,
    make_scheduler,
    received,
    run_step,
    run_to_end,
)


def test_c63_a_request_that_skips_the_cache_hits_nothing_and_is_hit() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    prompt = range(33)

    def computed(*, skips: bool) -> tuple[int, int]:
        """Prompt tokens that its first step computes, and those that it reports as cached."""
        request = make_request(prompt=prompt, max_tokens=1, skip_reading_prefix_cache=skips)
        scheduler.add_request(request)
        plan, (output,) = run_step(scheduler, runner)
        return plan.num_scheduled_tokens[request.request_id], output.num_cached_tokens

    assert computed(skips=True) == (33, 0)
    assert computed(skips=False) == (1, 32), "the first one has written its blocks"
    queries = scheduler.counters()["prefix_cache_queries"]
    assert computed(skips=True) == (33, 0)
    assert scheduler.counters()["prefix_cache_queries"] == queries, "the cache is not even asked"
    assert computed(skips=False) == (1, 32)
    assert_at_rest(scheduler)


@pytest.mark.parametrize(("skips", "num_tokens"), [(True, 34), (False, 2)])
def test_c63_a_victim_that_skips_the_cache_does_not_find_its_own_blocks_either(
    skips: bool, num_tokens: int
) -> None:
    scheduler, runner = make_scheduler(num_blocks=5), FakeRunner()
    older = make_request(16, max_tokens=3)
    victim = make_request(33, max_tokens=4, skip_reading_prefix_cache=skips)
    for request in (older, victim):
        scheduler.add_request(request)
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)
    assert plan.preempted_req_ids == {victim.request_id}
    while victim.status is RequestStatus.PREEMPTED:
        plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens[victim.request_id] == num_tokens
    run_to_end(scheduler, runner)
    assert_at_rest(scheduler)


@pytest.mark.parametrize(("skips", "num_loaded"), [(False, 8), (True, 40)])
def test_c63_a_load_that_skips_the_cache_loads_the_whole_prompt(skips: bool, num_loaded: int) -> None:
    connector = FakeConnector(holds=True)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    known = make_request(40, max_tokens=1)
    scheduler.add_request(known)
    run_to_end(scheduler, runner)
    request = make_request(
        prompt=known.prompt_token_ids,
        role=TransferRole.CONSUMER,
        max_tokens=4,
        skip_reading_prefix_cache=skips,
    )
    scheduler.add_request(request)
    run_step(scheduler, runner)
    block_ids, num_tokens = connector.started[request.request_id]
    assert (num_tokens, len(block_ids)) == (num_loaded, -(-num_loaded // 16))
    (output,) = flatten(scheduler.update_connector_output(received(request)))
    assert output.num_cached_tokens == 40 - num_loaded
    run_to_end(scheduler, runner)
    assert_at_rest(scheduler)
