from dataclasses import replace

from benchmarks.metrics import record_of
from gateway.requests.attempt import Attempt
from gateway.routing.placement import Mode, Placement
from gateway.telemetry.timeline import TimelineStage, stages_of

PAIR = Placement(Mode.DISAGGREGATED, "p0", "d0")


def test_the_first_step_of_a_request_that_moved_lies_in_its_latest_attempt() -> None:
    """Its client had tokens from the one before."""
    record = record_of(num_tokens=100)
    assert record.finish is not None
    timing = replace(record.finish.timing, handover_ended_s=1.5)
    assert timing.handover_parts is not None
    attempts = (
        Attempt("r.0", PAIR, 0, number=0, began_at=0.001, ended_at=0.5),
        Attempt("r.1", PAIR, 2, number=1, began_at=1.0, ended_at=record.ended_at),
    )
    stages = stages_of(replace(record, finish=replace(record.finish, timing=timing), attempts=attempts))
    assert [stage.name for stage in stages] == ["intake", "queue", "attempt", "queue", "attempt"]
    first, latest = stages[2], stages[4]
    assert [stage.name for stage in _all(first)] == ["worker_queue", "prefill", "decode"]
    assert [stage.name for stage in _all(latest)] == ["decode", "first_decode_step"]
    step = _all(latest)[-1]
    assert (step.began_s, step.ended_s) == (1.5 - timing.handover_parts.first_step_s, 1.5)
    assert latest.began_s < step.began_s < step.ended_s < latest.ended_s


def _all(stage: TimelineStage) -> list[TimelineStage]:
    return [found for inner in stage.inside for found in (inner, *_all(inner))]
