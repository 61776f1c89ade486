"""StageTimes: a request's stages add up, whatever its path."""

import pytest

from baton.clock import VirtualClock
from baton.kv import KVTransferParams, TransferRole
from baton.request import FinishReason, FirstToken, RequestOutput, StageTimes
from baton.step import KVConnectorOutput, ReceivedKV
from scheduler import RequestStatus
from tests.factories.engine import FakeConnectorWorker, StepHook, make_core, make_engine_request
from tests.factories.scheduling import PEER


def run(core_step_s: float, role: TransferRole | None, received_after_s: float = 0.0) -> StageTimes:
    """One request, two steps of `core_step_s` each after one second in the queue."""
    clock = VirtualClock()
    connector = FakeConnectorWorker()
    core = make_core(StepHook(lambda _: clock.advance(core_step_s)), connector, clock, async_scheduling=False)
    transfer = KVTransferParams(role, "t", 0, PEER) if role else None
    core.add_request(make_engine_request(max_tokens=2, kv_transfer=transfer), "gateway")
    clock.advance(1.0)
    outputs: list[RequestOutput] = []
    for _ in range(6):
        outputs += core.step().get("gateway", [])
        if role is TransferRole.CONSUMER and not outputs:
            clock.advance(received_after_s)
            load = ReceivedKV("r", FirstToken(7, None), 1_000, received_after_s, received_after_s / 2)
            connector.news.append(KVConnectorOutput(finished_recving=(load,)))
    assert outputs[-1].finish_reason is not None
    stages = outputs[-1].stage_times
    assert stages is not None
    return stages


def test_a_local_request_queues_then_prefills_then_decodes() -> None:
    stages = run(0.5, None)
    assert (stages.queue_s, stages.prefill_s, stages.decode_s) == pytest.approx((1.0, 0.5, 0.5))


def test_a_producer_ends_with_its_prefill() -> None:
    stages = run(0.5, TransferRole.PRODUCER)
    assert (stages.queue_s, stages.prefill_s, stages.decode_s) == pytest.approx((1.0, 0.5, 0.0))


def test_a_consumer_waits_for_its_blocks_instead_of_computing() -> None:
    stages = run(0.5, TransferRole.CONSUMER, received_after_s=3.0)
    assert (stages.queue_s, stages.transfer_s, stages.transfer_moving_s) == pytest.approx((1.0, 3.0, 1.5))
    assert (stages.prefill_s, stages.decode_s) == pytest.approx((0.0, 0.5))
    assert stages.transfer_bytes == 1_000


def test_a_request_that_ends_in_the_queue_spent_its_time_there() -> None:
    clock = VirtualClock()
    core = make_core(clock=clock)
    core.add_request(make_engine_request(), "gateway")
    clock.advance(2.0)
    outputs = core.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)["gateway"]
    assert outputs[0].finish_reason is FinishReason.ABORT
    assert outputs[0].stage_times == StageTimes(queue_s=2.0)
