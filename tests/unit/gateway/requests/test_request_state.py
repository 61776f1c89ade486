"""One client's request: every token once, in order, whatever the workers and the network do to it."""

import random
from dataclasses import replace

import pytest

from baton.config import GatewayConfig
from baton.kv import TransferRole
from baton.request import FinishReason, RequestOutput, StageTimes, TokenLogprobs
from baton.sampling import SamplingParams
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from gateway.requests.attempt import AttemptFailure, Cause
from gateway.requests.request import Delta, GatewayRequest
from gateway.requests.request_state import RequestState
from gateway.requests.retry import RetryState
from gateway.routing.placement import Mode, Placement
from gateway.routing.router import Router
from gateway.text import TextStream
from gateway.timing.latency_window import LatencyWindow
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
PLACEMENT = Placement(Mode.DISAGGREGATED, "p0", "d0")
TEXT = "The cache is the baton"
TOKENS = TOKENIZER.encode(TEXT).ids


def make_state(window: LatencyWindow | None = None, **sampling: object) -> RequestState:
    """A request that was placed when it arrived."""
    params = SamplingParams(max_tokens=100, **sampling)  # type: ignore[arg-type]
    request = GatewayRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3, 4, 5),
        sampling_params=params,
        text=TextStream(TOKENIZER, params.stop, params.min_tokens, True),
    )
    retry = RetryState(request, Router(GatewayConfig(), b""), "retry", 10.0)
    state = RequestState(request, retry, window or LatencyWindow(), arrived_at=10.0)
    begin(state, PLACEMENT, 10.0)
    return state


def begin(state: RequestState, placement: Placement, now: float) -> None:
    if state.attempts:
        state.end_attempt(now, AttemptFailure("d0", Cause.LOST, "it was lost"))
    state.begin(state.retry.begin(placement, "r.0", state.num_output_tokens, now))


def output(position: int, *token_ids: int, **options: object) -> RequestOutput:
    return RequestOutput(request_id="r", first_position=position, token_ids=token_ids, **options)  # type: ignore[arg-type]


def collect(state: RequestState, news: list[tuple[str, RequestOutput]]) -> list[Delta]:
    deltas = [state.on_output(worker, item, 11.0 + i) for i, (worker, item) in enumerate(news)]
    return [delta for delta in deltas if isinstance(delta, Delta)]


def whole_story() -> list[tuple[str, RequestOutput]]:
    """Token 0 of both workers, the rest one by one, the end with the last token."""
    story = [
        ("p0", output(0, TOKENS[0], finish_reason=FinishReason.HANDED_OVER)),
        ("d0", output(0, TOKENS[0])),
    ]
    story += [("d0", output(i, token_id)) for i, token_id in enumerate(TOKENS[1:-1], 1)]
    return [*story, ("d0", output(len(TOKENS) - 1, TOKENS[-1], finish_reason=FinishReason.LENGTH))]


@pytest.mark.parametrize("seed", range(50))
def test_c51_reordered_and_doubled_outputs_give_every_token_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    story = whole_story() * rng.choice([1, 2])
    rng.shuffle(story)
    deltas: list[Delta] = []
    state = make_state()
    for worker, item in story:
        if deltas and deltas[-1].finish:
            break
        deltas += collect(state, [(worker, item)])
    assert [token_id for delta in deltas for token_id in delta.token_ids] == TOKENS
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_each_token_counts_once_when_the_client_gets_it() -> None:
    window = LatencyWindow()
    state = make_state(window, stop=("cache",))
    first, second, *others = TOKENS
    collect(state, [("p0", output(0, first)), ("d0", output(0, first)), ("d0", output(2, *others))])
    assert window.num_tokens == 1, "token 1 is missing, and token 0 came twice"
    (delta,) = collect(state, [("d0", output(1, second))])
    assert delta.finish is not None
    assert window.num_tokens == delta.finish.num_completion_tokens < len(TOKENS), (
        "none behind the stop string"
    )


def test_c51_an_output_from_before_the_answer_fails_the_attempt() -> None:
    """Only a faulty worker sends it. Its token 0 differs from the client's, so its token 1 must not follow."""
    state = make_state()
    assert [delta.token_ids for delta in collect(state, whole_story()[:1])] == [(TOKENS[0],)]
    failure = state.on_output("d0", output(-1, TOKENS[0], TOKENS[2], TOKENS[3]), 12.0)
    assert isinstance(failure, AttemptFailure)
    assert state.output_token_ids == (TOKENS[0],)


def test_token_0_does_not_wait_for_the_hand_over() -> None:
    state = make_state()
    deltas = collect(state, whole_story()[:2])
    assert [delta.token_ids for delta in deltas] == [(TOKENS[0],)]


def test_a_request_that_ends_on_the_prefill_worker_is_complete() -> None:
    state = make_state()
    (delta,) = collect(state, [("p0", output(0, 2, finish_reason=FinishReason.STOP, stop_token_id=2))])
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_token_id) == (FinishReason.STOP, 2)
    assert (delta.token_ids, delta.text) == ((2,), "")


@pytest.mark.parametrize("at_once", [1, 100])
def test_a_token_that_ends_the_answer_adds_no_text(at_once: int) -> None:
    """As in vLLM, this holds whether the client or the model named the token. If the length ended the answer,
    its last token is text."""
    end, shown = TOKENS[-1], TEXT.removesuffix("on")
    for chosen, reason, text in (
        ((end,), FinishReason.STOP, shown),
        ((5,), FinishReason.STOP, shown),
        ((end,), FinishReason.LENGTH, TEXT),
    ):
        state = make_state(stop_token_ids=chosen)
        groups = [TOKENS[at : at + at_once] for at in range(0, len(TOKENS), at_once)]
        story = [("d0", output(at * at_once, *group)) for at, group in enumerate(groups)]
        stop_token_id = end if reason is FinishReason.STOP else None
        story[-1][1].finish_reason, story[-1][1].stop_token_id = reason, stop_token_id
        deltas = collect(state, story)
        assert [token_id for delta in deltas for token_id in delta.token_ids] == TOKENS
        assert "".join(delta.text for delta in deltas) == text
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.stop_token_id == stop_token_id
        assert deltas[-1].finish.stop_reason == (stop_token_id if end in chosen else None)


def test_c52_another_attempt_goes_on_where_the_client_is() -> None:
    state = make_state(logprobs=0)
    logprobs = [TokenLogprobs(token_id, -0.5, 1, ()) for token_id in TOKENS]
    story = [
        ("d0", output(i, token_id, logprobs=(logprobs[i],), num_cached_tokens=3))
        for i, token_id in enumerate(TOKENS)
    ]
    lost = ("d0", output(5, 99, finish_reason=FinishReason.LENGTH))  # its predecessors never came
    first = collect(state, [*story[:3], lost])
    assert state.output_token_ids == tuple(TOKENS[:3])
    begin(state, Placement(Mode.LOCAL, None, "d1"), 10.0)
    end = ("d1", output(len(TOKENS), finish_reason=FinishReason.STOP, num_cached_tokens=7))
    second = collect(state, [("d1", item) for _, item in story[3:]] + [end])
    assert [t for delta in (*first, *second) for t in delta.token_ids] == TOKENS
    assert [one for delta in (*first, *second) for one in delta.logprobs] == logprobs
    assert "".join(delta.text for delta in (*first, *second)) == TEXT
    finish = second[-1].finish
    assert finish is not None
    assert (finish.num_attempts, finish.placement.decode, finish.num_completion_tokens) == (
        2,
        "d1",
        len(TOKENS),
    )
    assert finish.num_cached_tokens == 3, "of the prompt, not of the answer"


def test_accepted_drafts_behind_a_stop_string_do_not_count() -> None:
    state, num_drafts = make_state(stop=("is",)), len(TOKENS) - 2
    drafts = {"num_draft_tokens": num_drafts, "num_accepted_draft_tokens": num_drafts}
    (*_, last) = collect(state, [("d0", output(0, TOKENS[0])), ("d0", output(1, *TOKENS[1:], **drafts))])
    assert last.finish is not None
    assert last.finish.num_draft_tokens == num_drafts
    assert last.finish.num_accepted_draft_tokens == last.finish.num_completion_tokens - 1 < num_drafts


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_drafts_that_come_out_of_order_or_partly_repeated_count_once(first: int) -> None:
    """Tokens 1 to 5 are accepted drafts, and 6 was sampled behind them; the client has tokens before `first`."""
    state = make_state()
    drafts = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 5}
    early = ("d0", output(1, *TOKENS[1:7], **drafts))
    known = [("d0", output(0, *TOKENS[:first]))]
    end = ("d0", output(7, finish_reason=FinishReason.STOP))
    (*_, last) = collect(state, [*([early, early] if first == 1 else []), *known, early, early, end])
    assert last.finish is not None
    assert (last.finish.num_draft_tokens, last.finish.num_accepted_draft_tokens) == (8, 6 - first)


def test_drafts_of_all_attempts_count_and_repeated_outputs_do_not() -> None:
    state = make_state()
    drafts = {"num_draft_tokens": 4, "num_accepted_draft_tokens": 2}
    first = ("d0", output(1, *TOKENS[1:4], **drafts))
    collect(state, [("d0", output(0, TOKENS[0])), first, first])
    begin(state, Placement(Mode.LOCAL, None, "d1"), 10.0)
    drafts = {"num_draft_tokens": 3, "num_accepted_draft_tokens": 0}
    end = ("d1", output(5, *TOKENS[5:], finish_reason=FinishReason.LENGTH))
    (*_, last) = collect(state, [("d1", output(4, TOKENS[4], **drafts)), end])
    assert last.finish is not None
    assert (last.finish.num_draft_tokens, last.finish.num_accepted_draft_tokens) == (7, 2)


def test_a_stop_string_ends_the_request_before_the_workers_know() -> None:
    state = make_state(stop=("is",))
    deltas = collect(state, [("d0", output(0, *TOKENS))])
    assert deltas[-1].finish is not None
    assert (deltas[-1].finish.matched_stop, deltas[-1].finish.stop_reason) == ("is", "is")
    assert "".join(delta.text for delta in deltas) == "The cache "
    assert deltas[-1].finish.num_completion_tokens == len(deltas[-1].token_ids) < len(TOKENS)


def test_held_back_text_comes_with_the_end() -> None:
    state = make_state(stop=("baton!",))
    deltas = collect(state, whole_story())
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.matched_stop is None


def test_logprobs_stay_with_their_tokens() -> None:
    state = make_state(logprobs=0)
    logprobs = [TokenLogprobs(token_id, -0.5, 1, ()) for token_id in TOKENS[:3]]
    deltas = collect(
        state,
        [
            ("d0", output(1, *TOKENS[1:3], logprobs=tuple(logprobs[1:]))),
            ("d0", output(0, TOKENS[0], logprobs=(logprobs[0],))),
        ],
    )
    assert [delta.logprobs for delta in deltas] == [tuple(logprobs)]


def test_the_timing_says_where_the_time_went() -> None:
    state = make_state()
    story = whole_story()
    prefill = StageTimes(queue_s=0.25, prefill_s=0.5)
    decode = StageTimes(
        queue_s=0.1,
        transfer_s=0.7,
        transfer_moving_s=0.05,
        transfer_bytes=999,
        transport="zmq_tcp",
        decode_s=9.0,
    )
    story[0] = ("p0", output(0, TOKENS[0], finish_reason=FinishReason.HANDED_OVER, stage_times=prefill))
    last = output(len(TOKENS) - 1, TOKENS[-1], finish_reason=FinishReason.LENGTH, stage_times=decode)
    deltas = collect(state, [*story[:-1], ("d0", last)])
    assert deltas[-1].finish is not None
    timing = deltas[-1].finish.timing
    assert timing.ttft_s == 1.0
    assert (timing.queue_s, timing.prefill_s) == (0.25, 0.5)
    assert (timing.transfer_s, timing.transfer_bytes, timing.transport) == (0.05, 999, "zmq_tcp")
    assert timing.transfer_wait_s == pytest.approx(0.65)
    assert timing.handover_s == timing.itl_s[0] == 2.0
    assert len(timing.itl_s) == len(TOKENS) - 1
    assert timing.total_s == timing.ttft_s + sum(timing.itl_s)


def test_the_hand_over_of_a_request_that_moved_is_that_of_its_latest_attempt() -> None:
    """The hand-over of an earlier attempt lay between its first two tokens. The workers' times at the end are not
    about that hand-over."""
    state = make_state()
    collect(state, whole_story()[:4])
    num_before = state.num_output_tokens
    assert num_before >= 2
    begin(state, PLACEMENT, 100.0)
    stages = StageTimes(first_step_s=3.0, transfer_bytes=1)
    end = FinishReason.LENGTH
    state.on_output("p0", output(num_before, TOKENS[num_before]), 110.0)
    state.on_output("d0", output(num_before + 1, TOKENS[num_before + 1]), 115.0)
    rest = output(num_before + 2, *TOKENS[num_before + 2 :], finish_reason=end, stage_times=stages)
    last = state.on_output("d0", rest, 120.0)
    assert isinstance(last, Delta)
    assert last.finish is not None
    timing = last.finish.timing
    assert (timing.handover_s, timing.handover_ended_s) == (5.0, 115.0 - state.arrived_at)
    assert timing.handover_parts is not None
    assert timing.handover_parts.first_step_s == 3.0


def taken(attempt: int, end: TransferEventKind, at_s: float) -> TransferRecord:
    return TransferRecord(
        role=TransferRole.CONSUMER, peer="p0", attempt=attempt, events=(TransferEvent(end, at_s),)
    )


def test_only_administrators_learn_why_a_hand_over_failed() -> None:
    state = make_state()
    story = whole_story()
    why = replace(taken(0, TransferEventKind.FAILED, 3.0), reason="cannot open /dev/shm/kv")
    last = output(
        len(TOKENS) - 1,
        TOKENS[-1],
        finish_reason=FinishReason.LENGTH,
        stage_times=StageTimes(transfers=(why,)),
    )
    delta = collect(state, [*story[:-1], ("d0", last)])[-1]
    assert delta.finish is not None
    finish = delta.without_reasons().finish
    assert finish is not None
    assert [seen.record.reason for seen in delta.finish.timing.transfers] == ["cannot open /dev/shm/kv"]
    assert [seen.record for seen in finish.timing.transfers] == [replace(why, reason="")]
    assert replace(finish, timing=delta.finish.timing) == delta.finish


def test_every_hand_over_is_reported_even_those_of_failed_attempts() -> None:
    state = make_state()
    failed = StageTimes(transfers=(taken(0, TransferEventKind.FAILED, 3.0),))
    state.on_output("d0", output(0, finish_reason=FinishReason.ERROR, stage_times=failed), 11.0)
    begin(state, PLACEMENT, 14.0)
    done = StageTimes(transfer_bytes=1, transfers=(taken(1, TransferEventKind.VERIFIED, 0.5),))
    given = TransferEvent(TransferEventKind.RELEASED, 0.75)
    late = TransferRecord(role=TransferRole.PRODUCER, peer="d0", attempt=1, events=(given,))
    story = whole_story()
    story[-1] = (
        "d0",
        output(len(TOKENS) - 1, TOKENS[-1], finish_reason=FinishReason.LENGTH, stage_times=done),
    )
    story[0] = ("p0", output(0, TOKENS[0], finish_reason=FinishReason.HANDED_OVER, stage_times=StageTimes()))
    story.insert(2, ("p0", output(0, stage_times=StageTimes(prefill_s=0.5, transfers=(late,)))))
    deltas = collect(state, story)
    assert deltas[-1].finish is not None
    timing = deltas[-1].finish.timing
    assert [(seen.worker, seen.record.attempt, seen.record.events) for seen in timing.transfers] == [
        ("d0", 0, (TransferEvent(TransferEventKind.FAILED, 3.0),)),
        ("p0", 1, (TransferEvent(TransferEventKind.RELEASED, 4.75),)),
        ("d0", 1, (TransferEvent(TransferEventKind.VERIFIED, 4.5),)),
    ]
    assert timing.prefill_s == 0.5
    assert [t for delta in deltas for t in delta.token_ids] == TOKENS
