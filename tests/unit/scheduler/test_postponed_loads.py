"""Postponed loads, as the scheduler sees them: the room comes back, the request keeps its place and waits."""

from baton.kv import TransferRole
from baton.request import ErrorKind
from baton.step import FailedKV, KVConnectorOutput
from scheduler import Request, RequestStatus, Scheduler
from tests.factories.scheduling import (
    FakeRunner,
    assert_at_rest,
    flatten,
    make_config,
    make_request,
    received,
    run_step,
)
from worker.kv_connector_scheduler import KVConnectorScheduler

CONSUMER = TransferRole.CONSUMER


def make_scheduler(**overrides: object) -> Scheduler:
    return Scheduler(make_config(**overrides), KVConnectorScheduler(16), hash_key=b"k" * 16)


def postponed(*requests: Request, num_valid_blocks: int = 0) -> KVConnectorOutput:
    news = [FailedKV(r.request_id, num_valid_blocks, "stuck", is_postponed=True) for r in requests]
    return KVConnectorOutput(failed_recving=tuple(news))


def can_load(request: Request) -> KVConnectorOutput:
    return KVConnectorOutput(can_load=(request.request_id,))


def start_load(scheduler: Scheduler, num_tokens: int = 40) -> Request:
    request = make_request(num_tokens, role=CONSUMER, max_tokens=2)
    scheduler.add_request(request)
    run_step(scheduler, FakeRunner())
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


def test_c31_its_blocks_are_free_and_it_is_not_loaded_before_the_connector_says_so() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request = start_load(scheduler)
    assert scheduler.update_connector_output(postponed(request)) == {}
    assert scheduler.kv_block_counts().referenced == 0
    for _ in range(3):
        run_step(scheduler, runner)
    assert scheduler.request_counts().waiting_for_remote_kvs == 0
    scheduler.update_connector_output(can_load(request))
    run_step(scheduler, runner)
    assert scheduler.loading_ids == (request.request_id,)
    assert scheduler.counters()["kv_prompt_loads_postponed"] == 1
    assert scheduler.counters().get("kv_load_failures", 0) == 0


def test_c31_what_it_had_received_is_in_the_prefix_cache_when_it_loads_again() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request = start_load(scheduler)
    scheduler.update_connector_output(postponed(request, num_valid_blocks=1))
    scheduler.update_connector_output(can_load(request))
    plan, _ = run_step(scheduler, runner)
    (load,) = plan.kv_connector_metadata.loads
    assert load.first_index == 1


def test_a_step_fails_while_it_loads_again_behind_what_it_had_received_and_it_is_given_back() -> None:
    """Its first load had no hits; its second one has, and a failed step may not have computed them."""
    scheduler, runner = make_scheduler(), FakeRunner()
    request = start_load(scheduler)
    scheduler.update_connector_output(postponed(request, num_valid_blocks=1))
    scheduler.update_connector_output(can_load(request))
    scheduler.add_request(make_request(8))
    plan, _ = run_step(scheduler, runner)
    assert scheduler.loading_ids == (request.request_id,)
    ended = flatten(scheduler.retry_in_halves(plan, (), "it broke"))
    assert (request.request_id, ErrorKind.GIVEN_BACK) in [(o.request_id, o.error_kind) for o in ended]


def test_c31_the_one_that_can_load_is_asked_about_however_many_others_cannot() -> None:
    """There are more postponed loads than a step asks about, and no other work that would cause another step."""
    scheduler, runner = make_scheduler(max_num_seqs=1, num_blocks=64), FakeRunner()
    requests = []
    for _ in range(4):
        requests.append(start_load(scheduler))
        scheduler.update_connector_output(postponed(requests[-1]))
    scheduler.update_connector_output(can_load(requests[2]))
    run_step(scheduler, runner)
    assert scheduler.loading_ids == (requests[2].request_id,)


def test_c30_it_does_not_keep_later_requests_from_loading() -> None:
    scheduler = make_scheduler(num_blocks=5)
    first = start_load(scheduler)
    scheduler.update_connector_output(postponed(first))
    second = start_load(scheduler)
    assert scheduler.loading_ids == (second.request_id,)


def test_c32_a_request_that_ended_while_it_was_put_off() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request, late = start_load(scheduler), start_load(scheduler)
    scheduler.update_connector_output(postponed(request))
    scheduler.finish_requests([request.request_id, late.request_id], RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_block_counts().quarantined == 3
    scheduler.update_connector_output(postponed(late))
    scheduler.update_connector_output(can_load(request))
    run_step(scheduler, runner)
    assert_at_rest(scheduler)


def test_c33_news_of_loads_that_are_not_put_off_change_nothing() -> None:
    scheduler = make_scheduler()
    request = start_load(scheduler)
    scheduler.update_connector_output(can_load(request))
    scheduler.update_connector_output(received(request))
    scheduler.update_connector_output(postponed(request))
    scheduler.update_connector_output(can_load(request))
    assert scheduler.schedule().num_scheduled_tokens == {request.request_id: 1}
