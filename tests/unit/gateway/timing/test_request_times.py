"""Where the time to first token went: the parts add up to it, whatever happened on the way and whatever workers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.request import StageTimes
from gateway.routing.placement import Mode, Placement
from gateway.timing.latency_window import LatencyWindow
from gateway.timing.request_times import RequestTimes, TtftParts, split_handover

PAIR = Placement(Mode.DISAGGREGATED, "p0", "d0")
ALONE = Placement(Mode.LOCAL, None, "d0")

seconds = st.floats(0.0, 1e4)
stages = st.builds(StageTimes, queue_s=seconds, prefill_s=seconds, transfer_s=seconds, first_step_s=seconds)


def total(parts: TtftParts) -> float:
    measured = parts.gateway_s + parts.queue_s + parts.failed_attempts_s
    return measured + parts.worker_queue_s + parts.transfer_exposed_s + parts.prefill_s


def parts_of(placement: Placement, bringer: str, reported: dict[str, StageTimes]) -> TtftParts:
    """Preprocessing 1 s, queue 2 s, a failed attempt 4 s, queue again 8 s; the token arrives at 31 s."""
    times = RequestTimes(0.0, 1.0, LatencyWindow())
    times.begin_attempt(0, PAIR, 3.0)
    times.note_stages("p0", StageTimes(prefill_s=2.0))
    times.end_attempt(7.0)
    times.begin_attempt(1, placement, 15.0)
    for worker, stage_times in reported.items():
        times.note_stages(worker, stage_times)
    before = times.ttft_parts
    assert before is None
    times.note_tokens(bringer, 1, 31.0)
    times.note_tokens("another", 1, 32.0)
    times.end_attempt(40.0)
    times.begin_attempt(2, ALONE, 41.0)
    times.note_stages("d0", StageTimes(prefill_s=3.0))
    parts = times.ttft_parts
    assert parts is not None
    assert (parts.queue_s, parts.failed_attempts_s) == (10.0, 4.0)
    assert total(parts) == pytest.approx(31.0)
    return parts


def test_the_prefill_worker_computes_and_tells() -> None:
    parts = parts_of(
        PAIR, "p0", {"p0": StageTimes(queue_s=5.0, prefill_s=9.0), "d0": StageTimes(queue_s=6.0)}
    )
    assert (parts.worker_queue_s, parts.prefill_s, parts.transfer_exposed_s) == (5.0, 9.0, 0.0)
    assert parts.gateway_s == pytest.approx(1.0 + 2.0)


def test_a_decode_worker_alone_computes_and_tells() -> None:
    parts = parts_of(ALONE, "d0", {"d0": StageTimes(queue_s=5.0, prefill_s=9.0)})
    assert (parts.worker_queue_s, parts.prefill_s, parts.transfer_exposed_s) == (5.0, 9.0, 0.0)


def test_the_prefill_workers_word_is_lost_and_the_decode_worker_tells() -> None:
    """The decode worker's wait for the prompt overlaps the prefill. Only the rest of this wait counts as exposed."""
    reported = {
        "p0": StageTimes(queue_s=2.0, prefill_s=9.0),
        "d0": StageTimes(queue_s=1.0, transfer_s=14.0, transfer_bytes=1),
    }
    parts = parts_of(PAIR, "d0", reported)
    assert (parts.worker_queue_s, parts.prefill_s, parts.transfer_exposed_s) == (2.0, 9.0, 3.0)
    assert parts.gateway_s == pytest.approx(1.0 + 2.0)


def test_without_a_report_of_the_prefill_worker_the_whole_wait_counts_as_transfer() -> None:
    parts = parts_of(PAIR, "d0", {"d0": StageTimes(transfer_s=14.0, transfer_bytes=1)})
    assert (parts.worker_queue_s, parts.prefill_s, parts.transfer_exposed_s) == (0.0, 0.0, 14.0)


def test_the_prompt_does_not_arrive_and_the_decode_worker_computes_it() -> None:
    reported = {"d0": StageTimes(queue_s=1.0, transfer_s=5.0, prefill_s=9.0)}
    parts = parts_of(PAIR, "d0", reported)
    assert (parts.worker_queue_s, parts.transfer_exposed_s, parts.prefill_s) == (1.0, 5.0, 9.0)


@given(st.sampled_from([PAIR, ALONE]), st.sampled_from(["p0", "d0"]), stages, stages)
def test_parts_add_up_and_none_is_negative_whatever_workers_say(
    placement: Placement, bringer: str, prefill: StageTimes, decode: StageTimes
) -> None:
    parts = parts_of(placement, bringer, {"p0": prefill, "d0": decode})
    assert min(parts.gateway_s, parts.worker_queue_s, parts.transfer_exposed_s, parts.prefill_s) >= 0.0


@given(seconds, stages, st.none() | seconds)
def test_parts_of_a_hand_over_add_up_and_none_is_negative(
    gap_s: float, decode: StageTimes, exposed_s: float | None
) -> None:
    parts = split_handover(gap_s, decode, exposed_s)
    values = parts.transfer_exposed_s, parts.first_step_s, parts.gateway_s
    assert min(values) >= 0.0
    assert sum(values) == pytest.approx(gap_s)


def test_without_a_prefill_workers_report_the_rest_counts_as_transfer() -> None:
    decode = StageTimes(first_step_s=1.0)
    assert split_handover(5.0, decode, None).transfer_exposed_s == 4.0
    assert split_handover(5.0, decode, 3.0).gateway_s == 1.0


@pytest.mark.parametrize(("second_at", "first_step_s"), [(9.0, 0.0), (12.0, 2.0)])
def test_without_a_gap_around_a_hand_over_its_first_step_counts_no_time(
    second_at: float, first_step_s: float
) -> None:
    """The decode worker may be the first to report token 0, in one report with token 1."""
    times = RequestTimes(0.0, 0.0, LatencyWindow())
    times.begin_attempt(0, PAIR, 1.0)
    times.note_stages("d0", StageTimes(transfer_s=3.0, first_step_s=2.0))
    times.note_tokens("d0", 1, 9.0)
    times.note_tokens("d0", 1, second_at)
    timing = times.timing(PAIR, 0, 20.0)
    assert timing.handover_s == second_at - 9.0
    assert timing.handover_parts is not None
    assert timing.handover_parts.first_step_s == first_step_s


def test_the_timing_says_when_the_latest_attempt_began_and_what_it_found() -> None:
    times = RequestTimes(10.0, 0.0, LatencyWindow())
    times.begin_attempt(0, PAIR, 11.0)
    times.note_tokens("p0", 1, 12.0)
    times.end_attempt(13.0)
    times.begin_attempt(1, ALONE, 14.0)
    times.note_tokens("d0", 2, 15.0)
    timing = times.timing(ALONE, 1, 16.0)
    assert (timing.attempt_began_s, timing.num_tokens_before) == (4.0, 1)


def test_the_first_token_counts_from_the_arrival_and_the_others_from_the_one_before() -> None:
    window = LatencyWindow()
    times = RequestTimes(10.0, 0.0, window)
    for number in range(100):
        times.note_tokens("d0", 1, 12.0 + number * 0.05)
    seen = window.latencies(60.0, now=17.0)
    assert seen.ttft_s == pytest.approx((2.0, 2.0), rel=0.02)
    assert seen.itl_s == pytest.approx((0.05, 0.05), rel=0.02)
    assert window.num_tokens == 100


def test_parts_are_those_of_the_attempt_that_brought_the_first_token() -> None:
    times = RequestTimes(0.0, 0.0, LatencyWindow())
    times.begin_attempt(0, ALONE, 1.0)
    times.note_stages("d0", StageTimes(prefill_s=3.0))
    times.note_tokens("d0", 1, 5.0)
    parts = times.ttft_parts
    for number in (1, 2):
        times.end_attempt(6.0)
        times.begin_attempt(number, ALONE, 7.0)
        times.note_stages("d0", StageTimes(prefill_s=1.0))
        assert times.ttft_parts == parts


def test_of_tokens_that_come_together_one_was_waited_for() -> None:
    window = LatencyWindow()
    times = RequestTimes(0.0, 0.0, window)
    times.note_tokens("d0", 0, 0.5)
    times.note_tokens("d0", 2, 1.0)
    times.note_tokens("d1", 2, 8.0)
    seen = window.latencies(60.0, now=9.0)
    assert (seen.num_first_tokens, window.num_tokens) == (1, 4)
    assert seen.ttft_s == pytest.approx((1.0, 1.0), rel=0.02)
    assert seen.itl_s == pytest.approx((0.0, 7.0), rel=0.02)
