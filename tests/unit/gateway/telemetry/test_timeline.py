import random
from dataclasses import replace

from baton.kv import TransferRole
from baton.request import FinishReason
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from gateway.auth.callers import ANYBODY
from gateway.requests.attempt import Attempt
from gateway.requests.record import Outcome, RequestRecord
from gateway.requests.request import Finish
from gateway.routing.placement import Mode, Placement
from gateway.telemetry.timeline import TimelineStage, stages_of
from gateway.timing.request_times import HandoverParts, SeenTransfer, Timing, TtftParts

PARTS = TtftParts(
    gateway_s=0.001,
    queue_s=0.0,
    failed_attempts_s=0.0,
    worker_queue_s=0.01,
    transfer_exposed_s=0.0,
    prefill_s=0.1,
)
HANDOVER = HandoverParts(transfer_exposed_s=0.001, first_step_s=0.01, gateway_s=0.0)
PAIR = Placement(Mode.DISAGGREGATED, "p0", "d0")


def test_the_first_step_of_a_request_that_moved_lies_in_its_latest_attempt() -> None:
    """The client already had tokens from the attempt before."""
    record = record_of(num_tokens=100)
    assert record.finish is not None
    timing = replace(record.finish.timing, handover_ended_s=1.5)
    assert timing.handover_parts is not None
    attempts = (
        Attempt("r.0", PAIR, 0, number=0, began_at=0.001, ended_at=0.5),
        Attempt("r.1", PAIR, 2, number=1, began_at=1.0, ended_at=record.ended_at),
    )
    stages = stages_of(replace(record, finish=replace(record.finish, timing=timing), attempts=attempts))
    assert [stage.name for stage in stages] == ["preprocess", "queue", "attempt", "queue", "attempt"]
    first, latest = stages[2], stages[4]
    assert [stage.name for stage in _all(first)] == ["worker_queue", "prefill", "decode"]
    assert [stage.name for stage in _all(latest)] == ["decode", "first_decode_step"]
    step = _all(latest)[-1]
    assert (step.began_s, step.ended_s) == (1.5 - timing.handover_parts.first_step_s, 1.5)
    assert latest.began_s < step.began_s < step.ended_s < latest.ended_s


def test_the_prefill_of_a_decode_worker_begins_after_its_load_failed() -> None:
    events = (TransferEvent(TransferEventKind.ASKED, 0.002), TransferEvent(TransferEventKind.FAILED, 0.5))
    lost = TransferRecord(role=TransferRole.CONSUMER, peer="p0", attempt=0, events=events)
    record = replace(
        record_of(num_tokens=100),
        ttft_parts=replace(PARTS, transfer_exposed_s=0.498),
        attempts=(Attempt("r.0", PAIR, 0, number=0, began_at=0.001, ended_at=2.0),),
        transfers=(SeenTransfer("d0", lost),),
        ended_at=2.0,
    )
    stages = {stage.name: stage for stage in _all(stages_of(record)[-1])}
    assert stages["worker_queue"].began_s == 0.001 + 0.498
    assert stages["prefill"].began_s == stages["worker_queue"].ended_s
    assert stages["prefill"].ended_s <= stages["decode"].began_s


def _all(stage: TimelineStage) -> list[TimelineStage]:
    return [found for inner in stage.inside for found in (inner, *_all(inner))]


def record_of(num_tokens: int) -> RequestRecord:
    """A request that was handed over, finished and had so many tokens."""
    rng = random.Random(1)
    itl_s = tuple(rng.expovariate(50.0) for _ in range(num_tokens - 1))
    timing = Timing(
        ttft_s=0.111,
        itl_s=itl_s,
        queue_s=0.01,
        prefill_s=0.1,
        transfer_s=0.02,
        transfer_bytes=1 << 20,
        handover_s=0.011,
        decode_s=sum(itl_s),
        total_s=0.111 + sum(itl_s),
        transfer_wait_s=0.1,
        transport="shared_memory",
        ttft_parts=PARTS,
        handover_parts=HANDOVER,
    )
    placement = Placement(Mode.DISAGGREGATED, "w0", "w1")
    finish = Finish(FinishReason.LENGTH, None, None, 100, num_tokens, 0, timing, placement, 1)
    return RequestRecord(
        request_id="r",
        caller=ANYBODY,
        api="chat",
        trace=None,
        is_chat=True,
        outcome=Outcome.FINISHED,
        error=None,
        arrived_at=0.0,
        ended_at=timing.total_s,
        num_prompt_tokens=100,
        num_output_tokens=num_tokens,
        num_attempts=1,
        path="disaggregated",
        finish=finish,
        ttft_parts=PARTS,
    )
