"""StageTimes: a request's stages add up, whatever its path."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.clock import VirtualClock
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole
from baton.request import FinishReason, FirstToken, RequestOutput, StageTimes
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from scheduler import RequestStatus
from tests.factories.engine import FakeBlockMover, StepHook, make_core, make_engine_request
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import PEER, FakeRunner
from worker.stages import StageTimer


class AnyMemory(PagedMemory):
    """Contains what a peer would have written."""

    def holds(self, block_ids: Sequence[int], contents: Sequence[int], first: int) -> bool:
        return True


def run(core_step_s: float, role: TransferRole | None, received_after_s: float = 0.0) -> StageTimes:
    """One request, two steps of `core_step_s` each after one second in the queue."""
    clock = VirtualClock()
    connector = FakeBlockMover()
    device = StepHook(lambda _: clock.advance(core_step_s), FakeRunner(memory=AnyMemory(16)))
    core = make_core(device, connector, clock, async_scheduling=False)
    transfer = KVTransferParams(role, "t", 0, PEER) if role else None
    core.add_request(make_engine_request(max_tokens=2, kv_transfer=transfer), "gateway")
    clock.advance(1.0)
    outputs: list[RequestOutput] = []
    for _ in range(6):
        outputs += core.step().get("gateway", [])
        if role is TransferRole.CONSUMER and not outputs:
            clock.advance(received_after_s)
            load = ReceivedKV("r", FirstToken(7, None), 1_000, received_after_s, received_after_s / 2)
            connector.outputs.append(KVConnectorOutput(finished_recving=(load,)))
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


@pytest.mark.parametrize("tokens", [[(7,), (8,), (9,)], [(7, 8), (), (9,)]])
def test_the_first_step_is_what_lies_between_a_received_prompt_and_the_token_behind_it(
    tokens: list[tuple[int, ...]],
) -> None:
    clock = VirtualClock()
    timer = StageTimer(clock)
    timer.arrived("r", "gateway")
    timer.received([ReceivedKV("r", FirstToken(7, None), 1_000, 0.5, 0.25)])
    clock.advance(0.5)
    reported = []
    for position, token_ids in enumerate(tokens):
        reported.append(
            timer.produced(RequestOutput(request_id="r", first_position=position, token_ids=token_ids))
        )
        clock.advance(0.75)
    end = RequestOutput(request_id="r", first_position=3, finish_reason=FinishReason.STOP)
    last = timer.produced(end)
    assert [stages is not None for stages in reported] == [True, False, False]
    assert last is not None
    assert (last.first_step_s, last.decode_s) == ((0.75, 2.25) if len(tokens[0]) == 1 else (0.0, 2.25))


def test_the_first_token_comes_with_the_stages_until_then() -> None:
    clock = VirtualClock()
    core = make_core(StepHook(lambda _: clock.advance(0.5)), clock=clock, async_scheduling=False)
    core.add_request(make_engine_request(max_tokens=3), "gateway")
    clock.advance(1.0)
    outputs = [output for _ in range(3) for output in core.step()["gateway"]]
    assert [output.stage_times for output in outputs] == [
        StageTimes(queue_s=1.0, prefill_s=0.5),
        None,
        StageTimes(queue_s=1.0, prefill_s=0.5, decode_s=1.0),
    ]


def test_a_request_that_ends_in_the_queue_spent_its_time_there() -> None:
    clock = VirtualClock()
    core = make_core(clock=clock)
    core.add_request(make_engine_request(), "gateway")
    clock.advance(2.0)
    outputs = core.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)["gateway"]
    assert outputs[0].finish_reason is FinishReason.ABORT
    assert outputs[0].stage_times == StageTimes(queue_s=2.0)


FAILED = TransferRecord(
    role=TransferRole.CONSUMER,
    peer=PEER.name,
    attempt=0,
    events=(
        TransferEvent(TransferEventKind.BEGUN, 0.0),
        TransferEvent(TransferEventKind.ASKED, 0.25),
        TransferEvent(TransferEventKind.FIRST_PIECE, 90.25),
        TransferEvent(TransferEventKind.FAILED, 100.25),
    ),
    reason="the prefill worker is silent",
)


@pytest.mark.parametrize("on_failure", list(OnLoadFailure))
def test_c34_the_time_of_a_transfer_that_failed_is_the_transfers_and_not_the_queues(
    on_failure: OnLoadFailure,
) -> None:
    clock, connector = VirtualClock(), FakeBlockMover()
    core = make_core(StepHook(lambda _: clock.advance(0.5)), connector, clock, async_scheduling=False)
    transfer = KVTransferParams(TransferRole.CONSUMER, "t", 0, PEER, on_failure)
    core.add_request(make_engine_request(max_tokens=1, kv_transfer=transfer), "gateway")
    clock.advance(1.0)
    core.step()
    clock.advance(100.0)
    news = FailedKV("r", 0, FAILED.reason)
    connector.outputs.append(KVConnectorOutput(failed_recving=(news,), transfers={"r": FAILED}))
    outputs: list[RequestOutput] = []
    for _ in range(3):
        outputs += core.step().get("gateway", [])
    (output,) = outputs
    prefill_s = 0.5 if on_failure is OnLoadFailure.RECOMPUTE else 0.0
    assert output.stage_times == StageTimes(
        queue_s=1.0,
        transfer_s=100.0,
        transfer_moving_s=10.0,
        prefill_s=prefill_s,
        transfers=(FAILED.shifted(0.75),),
    )
    assert output.stage_times.transfers[0].ended_s == 101.0


def test_a_transfer_that_ended_during_a_step_has_its_own_times_and_not_those_of_the_steps_end() -> None:
    clock, connector = VirtualClock(), FakeBlockMover()
    core = make_core(StepHook(lambda _: clock.advance(8.0)), connector, clock, async_scheduling=False)
    transfer = KVTransferParams(TransferRole.CONSUMER, "t", 0, PEER, OnLoadFailure.REPORT)
    core.add_request(make_engine_request(max_tokens=1, kv_transfer=transfer), "gateway")
    clock.advance(1.0)
    core.step()
    clock.advance(8.0)  # a step of other requests, in which the load fails
    record = replace(FAILED, events=(*FAILED.events[:2], TransferEvent(TransferEventKind.FAILED, 2.0)))
    news = FailedKV("r", 0, FAILED.reason)
    connector.outputs.append(KVConnectorOutput(failed_recving=(news,), transfers={"r": record}))
    (output,) = core.step()["gateway"]
    assert output.stage_times is not None
    assert output.stage_times.transfers == (record.shifted(1.0),)


def test_a_release_after_the_prefills_end_is_reported_once_more_and_then_dropped() -> None:
    clock, connector = VirtualClock(), FakeBlockMover()
    core = make_core(StepHook(lambda _: clock.advance(0.5)), connector, clock, async_scheduling=False)
    transfer = KVTransferParams(TransferRole.PRODUCER, "t", 0, PEER)
    core.add_request(make_engine_request(max_tokens=2, kv_transfer=transfer), "gateway")
    (last,) = core.step()["gateway"]
    assert last.finish_reason is FinishReason.HANDED_OVER
    assert last.stage_times == StageTimes(prefill_s=0.5)
    clock.advance(2.0)
    events = TransferEvent(TransferEventKind.PREFILLED, 0.25), TransferEvent(TransferEventKind.RELEASED, 2.25)
    record = replace(FAILED, role=TransferRole.PRODUCER, events=events, reason="")
    for _ in range(2):  # reported twice, passed on once
        connector.outputs.append(KVConnectorOutput(finished_sending=("r",), transfers={"r": record}))
    (report,) = core.step()["gateway"]
    assert (report.token_ids, report.finish_reason, report.error) == ((), None, None)
    assert report.stage_times == StageTimes(prefill_s=0.5, transfers=(record,))
    assert core.step() == {}


def test_a_prompt_answered_by_the_prefill_worker_alone_is_not_reported_again() -> None:
    connector = FakeBlockMover()
    core = make_core(connector=connector, async_scheduling=False)
    transfer = KVTransferParams(TransferRole.PRODUCER, "t", 0, PEER)
    core.add_request(make_engine_request(max_tokens=1, kv_transfer=transfer), "gateway")
    (last,) = core.step()["gateway"]
    assert last.finish_reason is FinishReason.LENGTH
    connector.outputs.append(KVConnectorOutput(finished_sending=("r",), transfers={"r": FAILED}))
    assert core.step() == {}
