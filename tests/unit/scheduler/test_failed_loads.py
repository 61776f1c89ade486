"""Behaviour 35: what is left of loads that failed, where several requests want the same blocks."""

import pytest

from baton.kv import TransferRole
from baton.step import KVConnectorOutput
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    failed,
    make_request,
    make_scheduler,
    run_step,
)

CONSUMER = TransferRole.CONSUMER


@pytest.mark.parametrize("num_valid", [(0, 0), (1, 1), (1, 3), (3, 1)])
def test_c35_a_bad_block_that_two_loads_share_is_recomputed_once(num_valid: tuple[int, int]) -> None:
    connector = FakeConnector(holds=True)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    first = make_request(70, role=CONSUMER, max_tokens=1)
    second = make_request(prompt=first.prompt_token_ids, role=CONSUMER, max_tokens=1)
    for request in (first, second):
        scheduler.add_request(request)
    run_step(scheduler, runner)
    assert scheduler.request_counts().waiting_for_remote_kvs == 2
    for request, num_valid_blocks in zip((first, second), num_valid, strict=True):
        scheduler.update_connector_output(failed(request, num_valid_blocks))
    plan, _ = run_step(scheduler, runner)
    # What either of them verified is kept for both; the rest is computed by one, and 6 tokens fill no block.
    assert sorted(plan.num_scheduled_tokens.values()) == [6, 70 - 16 * max(num_valid)]
    tables = [set(new.block_ids[:4]) for new in plan.scheduled_new_reqs]
    assert tables[0] == tables[1], "they share every full block"


def test_c35_a_bad_block_is_recomputed_once_for_those_that_come_for_it_meanwhile() -> None:
    connector = FakeConnector(holds=True)
    scheduler = make_scheduler(connector, max_num_batched_tokens=32)
    runner = FakeRunner(memory=connector.memory)
    request = make_request(70, role=CONSUMER, max_tokens=4)
    scheduler.add_request(request)
    run_step(scheduler, runner)
    late = make_request(prompt=request.prompt_token_ids, max_tokens=1)
    scheduler.update_connector_output(failed(request, num_valid_blocks=1))
    scheduler.add_request(late)
    num_computed = 0
    while late.num_computed_tokens < 70 or request.num_computed_tokens < 70:
        plan, _ = run_step(scheduler, runner)
        num_computed += plan.total_num_scheduled_tokens
        assert num_computed < 200
    num_decoded = request.num_output_tokens - 1
    assert num_computed == 54 + 6 + num_decoded


def test_c35_what_a_failed_load_received_is_no_hit_and_its_request_counts_once() -> None:
    connector = FakeConnector(holds=True)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(80, role=CONSUMER, max_tokens=3)
    scheduler.add_request(request)
    run_step(scheduler, runner)
    scheduler.update_connector_output(failed(request, num_valid_blocks=3))
    plan, (output,) = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {request.request_id: 32}
    assert output.num_cached_tokens == 0
    counters = scheduler.counters()
    assert (counters["prefix_cache_queries"], counters["prefix_cache_hits"]) == (80, 0)


def test_c13_loads_that_fail_together_are_computed_in_the_order_in_which_they_came() -> None:
    connector = FakeConnector(holds=True)
    scheduler = make_scheduler(connector, max_num_batched_tokens=32)
    runner = FakeRunner(memory=connector.memory)
    requests = [make_request(32, role=CONSUMER, max_tokens=1) for _ in range(3)]
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    failures = [failed(request).failed_recving[0] for request in requests]
    scheduler.update_connector_output(KVConnectorOutput(failed_recving=tuple(failures)))
    for request in requests:
        plan, _ = run_step(scheduler, runner)
        assert list(plan.num_scheduled_tokens) == [request.request_id]
