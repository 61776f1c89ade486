"""Behaviours 28 to 36 as the scheduler sees them: prompts that come from elsewhere."""

import pytest

from baton.errors import InvalidRequest
from baton.kv import OnLoadFailure, TransferRole
from baton.request import ErrorKind, FinishReason
from baton.step import FailedKV, KVConnectorOutput
from baton.worker import RequestCounts
from scheduler import Request, RequestStatus, Scheduler
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    failed,
    flatten,
    make_request,
    make_scheduler,
    received,
    run_step,
    run_to_end,
)

CONSUMER = TransferRole.CONSUMER


def start_load(
    num_tokens: int = 40, **overrides: object
) -> tuple[Scheduler, FakeConnector, FakeRunner, Request]:
    """A consumer whose load is under way."""
    connector = FakeConnector(holds=True)
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector, **overrides)
    request = make_request(num_tokens, role=CONSUMER, max_tokens=4)
    scheduler.add_request(request)
    run_step(scheduler, runner)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return scheduler, connector, runner, request


def test_c28_a_request_with_a_remote_prompt_holds_blocks_and_is_not_scheduled() -> None:
    scheduler, connector, runner, request = start_load(40)
    block_ids, num_tokens = connector.started[request.request_id]
    assert (len(block_ids), num_tokens) == (3, 40)
    assert scheduler.kv_block_counts().referenced == 3
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {}
    assert scheduler.request_counts().waiting_for_remote_kvs == 1


def test_c28_its_blocks_cannot_be_hit_until_they_were_received() -> None:
    scheduler, _, runner, request = start_load(40)
    early = make_request(prompt=request.prompt_token_ids, max_tokens=1)
    scheduler.add_request(early)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {early.request_id: 40}
    scheduler.update_connector_output(received(request))
    late = make_request(prompt=request.prompt_token_ids, max_tokens=1)
    scheduler.add_request(late)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens[late.request_id] == 8


def test_c29_a_received_prompt_is_scheduled_in_the_next_step_and_nothing_is_recomputed() -> None:
    scheduler, _, runner, request = start_load(48)
    outputs = flatten(scheduler.update_connector_output(received(request, token_id=77)))
    assert [(o.first_position, o.token_ids, o.finish_reason) for o in outputs] == [(0, (77,), None)]
    plan, outputs = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {request.request_id: 1}
    new = plan.scheduled_new_reqs[0]
    assert (new.num_computed_tokens, new.output_token_ids, len(new.block_ids)) == (48, (77,), 4)
    assert [output.first_position for output in outputs] == [1]


def test_c29_a_received_prompt_does_not_wait_for_a_long_one_that_is_being_computed() -> None:
    scheduler, _, runner, request = start_load(40, max_num_batched_tokens=8)
    local, long = make_request(1), make_request(100)
    scheduler.add_request(local)
    scheduler.add_request(long)
    run_step(scheduler, runner)
    scheduler.update_connector_output(received(request))
    ids = local.request_id, request.request_id, long.request_id
    for _ in range(3):  # in every step from now on, not just in the first
        plan, outputs = run_step(scheduler, runner)
        assert dict(plan.num_scheduled_tokens) == dict(zip(ids, (1, 1, 6), strict=True))
        assert {output.request_id for output in outputs} == {*ids[:2]}
    assert tuple(plan.num_scheduled_tokens) == ids, "behind what began before it"


def test_c29_a_received_prompt_takes_the_next_slot_that_is_free() -> None:
    scheduler, _, runner, request = start_load(40, max_num_seqs=1)
    local, late = make_request(max_tokens=3), make_request()
    scheduler.add_request(local)
    scheduler.add_request(late)
    run_step(scheduler, runner)
    scheduler.update_connector_output(received(request))
    assert scheduler.waiting_ids(5) == (request.request_id, late.request_id)
    order = [list(run_step(scheduler, runner)[0].num_scheduled_tokens) for _ in range(3)]
    assert order == [[local.request_id], [local.request_id], [request.request_id]]
    assert scheduler.request_counts() == RequestCounts(running=1, waiting=1, waiting_for_remote_kvs=0)


def test_c29_received_requests_go_before_new_ones() -> None:
    scheduler, _, runner, request = start_load(40, max_num_batched_tokens=8)
    late = make_request(30)
    scheduler.add_request(late)
    scheduler.update_connector_output(received(request))
    plan, _ = run_step(scheduler, runner)
    assert dict(plan.num_scheduled_tokens) == {request.request_id: 1, late.request_id: 7}


def test_c30_not_known_yet_skips_the_request_for_this_step_only() -> None:
    connector = FakeConnector(is_unknown=True)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(role=CONSUMER)
    scheduler.add_request(request)
    run_step(scheduler, runner)
    assert request.status is RequestStatus.WAITING
    connector.is_unknown = False
    run_step(scheduler, runner)
    assert scheduler.request_counts().waiting_for_remote_kvs == 1


def test_c30_however_many_are_not_known_yet_a_step_asks_about_few_and_serves_the_others() -> None:
    connector = FakeConnector(is_unknown=True)
    scheduler, runner = make_scheduler(connector, max_num_seqs=4), FakeRunner(memory=connector.memory)
    consumers = [make_request(role=CONSUMER, max_tokens=1) for _ in range(50)]
    for request in consumers:
        scheduler.add_request(request)
    scheduler.add_request(make_request(max_tokens=30))
    assert len(run_step(scheduler, runner)[0].num_scheduled_tokens) == 1, "they block no other request"
    num_asked = connector.num_questions
    for _ in range(13):
        run_step(scheduler, runner)
    assert connector.num_questions == num_asked + 13 * 4, "so each was asked about again"
    assert scheduler.request_counts().waiting == 50
    assert len(scheduler.waiting_ids(60)) == 50
    scheduler.finish_requests([consumers[-1].request_id], RequestStatus.FINISHED_ABORTED)
    connector.is_unknown = False
    while scheduler.request_counts().waiting:
        for request in connector.loading.copy().values():
            scheduler.update_connector_output(received(request))
        run_step(scheduler, runner)
    assert len(connector.started) == 49


def test_hits_of_a_load_count_once_and_without_a_cache_nothing_does() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    scheduler.add_request(make_request(prompt=[5] * 64, max_tokens=1))
    run_to_end(scheduler, runner)
    request = make_request(prompt=[5] * 64 + [6] * 20, role=CONSUMER, max_tokens=2)
    scheduler.add_request(request)
    run_step(scheduler, runner)
    scheduler.update_connector_output(received(request))
    run_to_end(scheduler, runner)
    assert request.num_cached_tokens == 64
    counters = scheduler.counters()
    assert (counters["prefix_cache_queries"], counters["prefix_cache_hits"]) == (64 + 84, 64)
    uncached = make_scheduler(enable_prefix_caching=False)
    uncached.add_request(make_request())
    run_to_end(uncached)
    assert "prefix_cache_queries" not in uncached.counters()


def test_c31_too_few_blocks_and_no_transfer_starts() -> None:
    connector = FakeConnector()
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector, num_blocks=6)
    scheduler.add_request(make_request(33, max_tokens=3))
    run_step(scheduler, runner)
    request = make_request(32, role=CONSUMER)  # two blocks are free, but token 0 needs a third
    scheduler.add_request(request)
    run_step(scheduler, runner)
    assert connector.started == {}
    for _ in range(3):
        run_step(scheduler, runner)
    assert list(connector.started) == [request.request_id]


def test_c31_loads_do_not_pile_up_beyond_the_slots_and_keep_their_place() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector, max_num_seqs=2), FakeRunner(memory=connector.memory)
    consumers = [make_request(20, role=CONSUMER, max_tokens=2) for _ in range(4)]
    local = make_request(max_tokens=1)
    for request in [*consumers, local]:
        scheduler.add_request(request)
    plan, _ = run_step(scheduler, runner)
    assert list(connector.started) == [request.request_id for request in consumers[:2]]
    assert list(plan.num_scheduled_tokens) == [local.request_id], "a slot is free, so no request blocks it"
    for request in consumers[:2]:
        scheduler.update_connector_output(received(request))
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert list(connector.started) == [request.request_id for request in consumers]


@pytest.mark.parametrize("is_new", [False, True])
def test_c31_what_a_half_computed_prompt_still_needs_is_not_given_to_a_load(is_new: bool) -> None:
    connector = FakeConnector()
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector, num_blocks=11, max_num_batched_tokens=16)
    scheduler.add_request(make_request(16, role=CONSUMER))  # takes two of ten blocks
    scheduler.add_request(make_request(80, max_tokens=1))  # needs five of the others, holds one
    if not is_new:
        run_step(scheduler, runner)
    scheduler.add_request(make_request(60, role=CONSUMER))  # needs four: free, but spoken for
    run_step(scheduler, runner)
    assert len(connector.started) == 1


def test_c31_loads_that_fill_the_pool_can_all_take_their_first_step() -> None:
    connector = FakeConnector()
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector, num_blocks=7)
    requests = [make_request(32, role=CONSUMER, max_tokens=3) for _ in range(3)]
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    assert len(connector.started) == 2  # three blocks each
    for request in requests[:2]:
        scheduler.update_connector_output(received(request))
    plan, _ = run_step(scheduler, runner)
    assert set(plan.num_scheduled_tokens.values()) == {1}
    assert len(plan.num_scheduled_tokens) == 2


def test_c32_an_abort_during_a_transfer_quarantines_the_blocks_until_they_are_quiet() -> None:
    scheduler, connector, _, request = start_load(40)
    outputs = flatten(scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED))
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    assert connector.finished == [request]
    blocks = scheduler.kv_block_counts()
    assert (blocks.quarantined, blocks.free) == (3, blocks.total - 3)
    scheduler.check_integrity()
    scheduler.update_connector_output(KVConnectorOutput(quiesced=(request.request_id,)))
    assert_at_rest(scheduler)


def test_c32_a_completion_also_ends_a_quarantine() -> None:
    scheduler, _, _, request = start_load(40)
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert scheduler.update_connector_output(received(request)) == {}
    assert_at_rest(scheduler)


def test_c32_only_blocks_that_may_be_written_are_quarantined() -> None:
    connector = FakeConnector()
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector)
    prompt = range(100)
    scheduler.add_request(make_request(prompt=prompt, max_tokens=1))
    run_to_end(scheduler, runner)
    connector.holds = True
    request = make_request(prompt=prompt, role=CONSUMER)
    scheduler.add_request(request)
    run_step(scheduler, runner)
    assert connector.started[request.request_id][1] == 4  # the rest is in the local prefix cache
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    blocks = scheduler.kv_block_counts()
    assert (blocks.quarantined, blocks.free) == (1, blocks.total - 1)


def test_c32_an_abort_after_arrival_frees_at_once() -> None:
    scheduler, connector, _, request = start_load(40)
    scheduler.update_connector_output(received(request))
    connector.holds = False
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert_at_rest(scheduler)


def test_c33_late_double_and_unknown_completions_are_counted_and_ignored() -> None:
    scheduler, _, runner, request = start_load(40)
    scheduler.update_connector_output(received(request))
    stranger = make_request()
    for news in (
        received(request),
        failed(request),
        received(stranger),
        KVConnectorOutput(finished_sending=("nobody",), quiesced=("nobody", request.request_id)),
        KVConnectorOutput(unwanted=("nobody", request.request_id)),
    ):
        assert scheduler.update_connector_output(news) == {}
        scheduler.check_integrity()
    assert scheduler.counters()["kv_unknown_completions"] == 6
    run_step(scheduler, runner)
    assert request.num_output_tokens == 2


def test_c34_policy_recompute_computes_the_prompt_here_and_loads_no_second_time() -> None:
    scheduler, connector, runner, request = start_load(40)
    assert scheduler.update_connector_output(failed(request)) == {}
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {request.request_id: 40}
    assert len(connector.started) == 1
    connector.holds = False
    run_to_end(scheduler, runner)
    assert scheduler.counters()["kv_prompt_loads_failed"] == 1


def test_c34_a_failure_that_is_to_be_reported_ends_the_request_with_the_reason() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector)
    request = make_request(40, role=CONSUMER, on_failure=OnLoadFailure.REPORT)
    scheduler.add_request(request)
    run_step(scheduler, FakeRunner(memory=connector.memory))
    outputs = flatten(scheduler.update_connector_output(failed(request)))
    assert [(o.finish_reason, o.error, o.error_kind) for o in outputs] == [
        (FinishReason.ERROR, "peer lost", ErrorKind.KV_LOAD_FAILED)
    ]
    assert_at_rest(scheduler)


def test_c34_a_prompt_that_was_cancelled_elsewhere_is_not_computed_here() -> None:
    scheduler, connector, _, request = start_load(40)
    connector.holds = False
    outputs = flatten(scheduler.update_connector_output(failed(request, is_unneeded=True)))
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    counters = scheduler.counters()
    assert (counters["kv_prompt_loads_not_needed"], counters.get("kv_prompt_loads_failed", 0)) == (1, 0)
    assert_at_rest(scheduler)


@pytest.mark.parametrize(("num_valid", "num_left"), [(0, 70), (1, 54), (4, 6)])
def test_c35_a_partial_failure_keeps_the_valid_prefix_and_no_bad_block(num_valid: int, num_left: int) -> None:
    scheduler, _, runner, request = start_load(70)
    scheduler.update_connector_output(failed(request, num_valid_blocks=num_valid))
    twin = make_request(prompt=request.prompt_token_ids)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {request.request_id: num_left}
    scheduler.add_request(twin)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens[twin.request_id] == 6, "recomputed blocks are hit, by everyone"


def test_c36_a_preempted_consumer_recomputes_here_and_loses_no_token() -> None:
    scheduler, connector, runner, request = start_load(40)
    connector.holds = False
    scheduler.update_connector_output(received(request, token_id=77))
    run_step(scheduler, runner)
    known = list(request.output_token_ids)
    scheduler.reset_prefix_cache(force=True)
    assert request.status is RequestStatus.PREEMPTED
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {request.request_id: 42}
    assert request.output_token_ids[:2] == known
    assert known[0] == 77
    assert len(connector.started) == 1


def test_the_connector_is_notified_of_every_transfer_and_of_nothing_else() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector)
    local, consumer = make_request(), make_request(role=CONSUMER)
    scheduler.add_request(local)
    scheduler.add_request(consumer)
    assert connector.added == [consumer]
    scheduler.finish_requests([local.request_id, consumer.request_id], RequestStatus.FINISHED_ABORTED)
    assert connector.finished == [consumer]
    news = KVConnectorOutput(failed_recving=(FailedKV("nobody", 0, "?"),))
    scheduler.update_connector_output(news)
    assert connector.outputs == [news]


def test_a_forced_reset_amid_loads_that_share_a_prefix_forgets_it_for_good() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    prompt = range(100)
    scheduler.add_request(make_request(prompt=prompt, max_tokens=1))
    run_to_end(scheduler, runner)
    loads = [make_request(prompt=prompt, role=CONSUMER, max_tokens=30) for _ in range(2)]
    for request in loads:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    assert scheduler.reset_prefix_cache(force=True)
    for request in loads:
        scheduler.update_connector_output(received(request))
    again = make_request(prompt=prompt, max_tokens=1)
    scheduler.add_request(again)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens[again.request_id] == 100
    run_to_end(scheduler, runner)


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_an_id_is_in_use_until_its_last_block_is_back(status: RequestStatus) -> None:
    scheduler, _, _, request = start_load(40)
    twin = make_request(request_id=request.request_id)
    with pytest.raises(InvalidRequest, match="request_id"):
        scheduler.add_request(twin)
    scheduler.finish_requests([request.request_id], status)
    with pytest.raises(InvalidRequest, match="request_id"):
        scheduler.add_request(twin)
    scheduler.update_connector_output(KVConnectorOutput(quiesced=(request.request_id,)))
    scheduler.add_request(twin)
    run_to_end(scheduler)
