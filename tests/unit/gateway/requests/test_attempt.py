"""One try at a request: which ends of its sub-requests matter, and what is made of them."""

import pytest

from baton.errors import InvalidRequest
from baton.kv import WorkerRef
from baton.request import ErrorKind, FinishReason, RequestOutput
from gateway.requests.attempt import Attempt, AttemptFailure, Cause, Verdict
from gateway.routing.placement import Mode, Placement


def make_attempt(*, decode_recomputes: bool = False) -> Attempt:
    return Attempt("id", Placement(Mode.DISAGGREGATED, "p", "d"), 0, decode_recomputes)


def failure_of(result: Verdict | AttemptFailure | None) -> AttemptFailure:
    assert isinstance(result, AttemptFailure), f"it is {result}"
    return result


def tokens(*token_ids: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="id", first_position=0, token_ids=token_ids, finish_reason=finish)


def error(kind: ErrorKind, reason: str = "it happened") -> RequestOutput:
    return RequestOutput(
        request_id="id", first_position=0, finish_reason=FinishReason.ERROR, error=reason, error_kind=kind
    )


def aborted() -> RequestOutput:
    return RequestOutput(request_id="id", first_position=0, finish_reason=FinishReason.ABORT)


@pytest.mark.parametrize("is_prefill_first", [True, False])
def test_c52_a_prompt_that_was_given_back_is_nobodys_failure_whoever_tells_of_it_first(
    is_prefill_first: bool,
) -> None:
    attempt = make_attempt()
    if not is_prefill_first:
        assert attempt.on_output("d", error(ErrorKind.KV_LOAD_FAILED)) is Verdict.IGNORE
        assert attempt.open_workers == {"p"}
    failure = failure_of(attempt.on_output("p", error(ErrorKind.GIVEN_BACK)))
    assert (failure.cause, failure.is_prompt_lost) == (Cause.GIVEN_BACK, False)


@pytest.mark.parametrize("word", [aborted(), tokens(7, finish=FinishReason.HANDED_OVER)])
def test_c34_a_prompt_that_does_not_come_is_lost_for_the_reason_that_the_decode_worker_gives(
    word: RequestOutput,
) -> None:
    attempt = make_attempt()
    assert attempt.on_output("d", error(ErrorKind.KV_LOAD_FAILED, "no piece came")) is Verdict.IGNORE
    assert attempt.prefill_to_abort() == "p", "so that it has the last word soon"
    assert attempt.prefill_to_abort() is None
    failure = failure_of(attempt.on_output("p", word))
    assert (failure.worker, failure.cause) == ("p", Cause.FAILED)
    assert failure.is_prompt_lost
    assert "no piece came" in str(failure)


def test_c34_a_prefill_worker_that_is_lost_does_not_have_to_say_why_its_prompt_did_not_come() -> None:
    attempt = make_attempt()
    assert attempt.on_output("d", error(ErrorKind.KV_LOAD_FAILED)) is Verdict.IGNORE
    failure = failure_of(attempt.on_lost("p", "killed"))
    assert (failure.cause, failure.is_prompt_lost) == (Cause.LOST, True)


def test_c52_no_prefill_worker_continues_a_request_that_its_decode_worker_could_compute_alone() -> None:
    failure = failure_of(make_attempt(decode_recomputes=True).on_lost("d", "killed"))
    assert (failure.worker, failure.cause, failure.is_prompt_lost) == ("d", Cause.LOST, False)
    assert make_attempt(decode_recomputes=True).on_lost("p", "killed") is None


@pytest.mark.parametrize("worker", ["p", "d"])
def test_c52_a_request_that_is_lost_with_a_draining_worker_counts_as_given_back(worker: str) -> None:
    """The request was sent before the gateway learned of the drain, and arrived too late to be refused."""
    failure = failure_of(make_attempt().on_lost(worker, "its engine is stopped", has_left=True))
    assert (failure.cause, failure.is_prompt_lost) == (Cause.GIVEN_BACK, False)


def test_c34_a_prompt_that_was_handed_over_and_did_not_come_is_lost_at_once() -> None:
    attempt = make_attempt()
    assert attempt.on_output("p", tokens(7, finish=FinishReason.HANDED_OVER)) is Verdict.DELIVER
    failure_of(attempt.on_output("d", error(ErrorKind.KV_LOAD_FAILED)))
    assert attempt.prefill_to_abort() is None


def test_c52_a_decoding_request_survives_the_loss_of_its_prefill_worker_and_its_last_report() -> None:
    attempt = make_attempt()
    assert attempt.on_output("d", tokens(7, 8)) is Verdict.DELIVER
    assert attempt.on_lost("p", "killed") is None
    assert attempt.open_workers == {"d"}
    assert attempt.abandoned() is None
    failure_of(attempt.on_lost("d", "killed"))


@pytest.mark.parametrize("kind", [ErrorKind.GIVEN_BACK, ErrorKind.INTERNAL, ErrorKind.OVERLOADED])
def test_c52_a_decoding_request_continues_whatever_its_prefill_worker_reports_later(kind: ErrorKind) -> None:
    attempt = make_attempt()
    assert attempt.on_output("d", tokens(7, 8)) is Verdict.DELIVER
    assert attempt.on_output("p", error(kind)) is Verdict.IGNORE
    assert attempt.on_output("p", tokens(9, finish=FinishReason.HANDED_OVER)) is Verdict.IGNORE, (
        "it may be another token 0"
    )
    assert attempt.open_workers == {"d"}
    failure_of(attempt.on_output("d", aborted()))


def test_a_request_that_no_worker_could_serve_fails_by_its_own_fault() -> None:
    failure = failure_of(make_attempt().on_output("d", error(ErrorKind.INVALID_REQUEST, "seed: too large")))
    assert isinstance(failure.error, InvalidRequest)
    assert (failure.error.field, failure.error.problem) == ("seed", "too large")


def test_an_answer_speaks_for_the_workers_that_computed_part_of_it() -> None:
    def contributors(*from_prefill: RequestOutput, decode: RequestOutput | None) -> list[str]:
        attempt = make_attempt(decode_recomputes=True)
        attempt.refs = {name: WorkerRef(name, f"{name}-incarnation", ("tcp://here:1",), 16) for name in "pd"}
        for output in from_prefill:
            attempt.on_output("p", output)
        if decode is not None:
            attempt.on_output("d", decode)
        return [ref.name for ref in attempt.contributors]

    end = tokens(8, finish=FinishReason.STOP)
    assert contributors(tokens(7, finish=FinishReason.HANDED_OVER), decode=end) == ["p", "d"]
    assert contributors(error(ErrorKind.STEP_FAILED), decode=end) == ["d"], "which computed the prompt"
    assert contributors(decode=end) == ["d"]
    assert contributors(end, decode=None) == ["p"], "the first token ended the answer"


def test_each_end_of_a_sub_request_is_counted_once() -> None:
    attempt = make_attempt()
    assert attempt.newly_ended() == []
    attempt.on_output("p", tokens(7, finish=FinishReason.HANDED_OVER))
    assert attempt.newly_ended() == ["p"]
    assert attempt.close() == ["d"]
    assert (attempt.newly_ended(), attempt.newly_ended(), attempt.close()) == (["d"], [], [])
