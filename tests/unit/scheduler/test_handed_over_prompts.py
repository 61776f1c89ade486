"""Behaviours 37, 40 and 41 as the scheduler sees them: prompts that are computed for another worker."""

from collections import Counter
from typing import Any

import pytest

from baton.kv import TransferRole
from baton.request import FinishReason
from baton.step import KVConnectorOutput
from scheduler import Request, RequestStatus, Scheduler
from scheduler.kv_cache import KVCache
from tests.factories.scheduling import (
    EOS,
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    make_request,
    make_scheduler,
    run_step,
)

PRODUCER = TransferRole.PRODUCER


def produce(
    connector: FakeConnector, token_id: int = 9, **options: object
) -> tuple[Scheduler, Request, list[FinishReason | None]]:
    scheduler = make_scheduler(connector)
    request = make_request(40, role=PRODUCER, **options)  # type: ignore[arg-type]
    scheduler.add_request(request)
    _, outputs = run_step(scheduler, FakeRunner(lambda _, __: token_id, connector.memory))
    return scheduler, request, [output.finish_reason for output in outputs]


def test_c37_a_finished_prefill_keeps_all_its_blocks_until_they_are_released() -> None:
    connector = FakeConnector(holds=True)
    scheduler, request, reasons = produce(connector)
    assert reasons == [FinishReason.HANDED_OVER]
    assert request.first_token is not None
    assert request.first_token.token_id == 9
    assert not scheduler.has_requests()
    assert scheduler.kv_block_counts().leased == 3
    scheduler.check_integrity()
    scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request.request_id,)))
    assert_at_rest(scheduler)


def test_c37_prefills_that_share_a_prefix_count_its_blocks_once() -> None:
    connector = FakeConnector(holds=True)
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector)
    requests = [make_request(prompt=range(40), role=PRODUCER) for _ in range(2)]
    for request in requests:
        scheduler.add_request(request)
        run_step(scheduler, runner)
    blocks = scheduler.kv_block_counts()
    assert (blocks.leased, blocks.free, blocks.referenced) == (4, blocks.total - 4, 0)
    for request in requests:
        scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request.request_id,)))
        scheduler.check_integrity()
    assert_at_rest(scheduler)


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "reason"), [(9, 1, FinishReason.LENGTH), (EOS, 5, FinishReason.STOP)]
)
def test_c40_a_request_that_ends_with_its_first_token_is_answered_by_the_producer_alone(
    token_id: int, max_tokens: int, reason: FinishReason
) -> None:
    connector = FakeConnector()
    scheduler, request, reasons = produce(connector, token_id, max_tokens=max_tokens)
    assert reasons == [reason]
    assert connector.finished == [request]
    assert not request.is_handed_over
    assert_at_rest(scheduler)


def test_c41_a_preempted_producer_recomputes_before_it_hands_over() -> None:
    connector = FakeConnector(holds=True)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(40, role=PRODUCER)
    scheduler.add_request(request)
    plan = scheduler.schedule()
    result = runner.execute(plan)
    scheduler.reset_prefix_cache(force=True)
    assert scheduler.update_from_output(plan, result) == {}, (
        "its blocks are lost, and token 0 waits for new ones"
    )
    plan, outputs = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {request.request_id: 40}
    assert [(o.first_position, o.finish_reason) for o in outputs] == [(0, FinishReason.HANDED_OVER)]
    assert scheduler.kv_block_counts().leased == 3
    scheduler.update_connector_output(KVConnectorOutput(finished_sending=(request.request_id,)))
    assert_at_rest(scheduler)


def test_c40_a_cancel_during_the_last_prefill_step_counts_as_cancel() -> None:
    connector = FakeConnector()
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector)
    request = make_request(40, role=PRODUCER)
    scheduler.add_request(request)
    plan = scheduler.schedule()
    result = runner.execute(plan)
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert scheduler.update_from_output(plan, result) == {}
    assert connector.finished == [request]
    assert (request.status, request.first_token) == (RequestStatus.FINISHED_ABORTED, None)
    assert_at_rest(scheduler)


def test_the_end_of_a_lease_looks_at_its_own_blocks_only() -> None:
    """A prefill worker may lease a hundred thousand blocks, and each hand-over ends between two steps."""
    kv = KVCache(64, 4, enable_caching=True, hash_key=b"k" * 16)
    for name in ("a", "b"):
        request = make_request(request_id=name, prompt=[1, 2, 3, 4, 5])
        kv.tokens_arrived(request)
        assert kv.open_table(request, request.num_tokens, kv.find_cached_prefix(request))
        kv.lease(request)
    assert kv.counts().leased == 3, "the first block is in both leases"
    kv._num_leases = OwnOnly(kv._num_leases)
    assert kv.end_hold("a")
    assert kv.counts().leased == 2
    assert kv.end_hold("b")
    assert kv.counts().leased == 0
    kv.check_integrity()


class OwnOnly(Counter[int]):
    """Counts of leases that cannot be walked through."""

    def items(self) -> Any:
        raise AssertionError("it looks at the blocks of all leases")
