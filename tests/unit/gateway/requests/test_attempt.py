"""One try at a request: which ends of its legs matter, and what is made of them."""

import pytest

from baton.request import ErrorKind, FinishReason, RequestOutput
from gateway.requests.attempt import Attempt, AttemptFailed, Cause
from gateway.routing.placement import Mode, Placement


def make_attempt(*, decoder_copes: bool = False) -> Attempt:
    return Attempt("id", Placement(Mode.DISAGGREGATED, "p", "d"), 0, decoder_copes, {})


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
        assert not attempt.take("d", error(ErrorKind.KV_LOAD_FAILED))
        assert attempt.open_legs == {"p"}
    with pytest.raises(AttemptFailed) as caught:
        attempt.take("p", error(ErrorKind.GIVEN_BACK))
    assert (caught.value.cause, caught.value.is_prompt_lost) == (Cause.GIVEN_BACK, False)


@pytest.mark.parametrize("word", [aborted(), tokens(7, finish=FinishReason.HANDED_OVER)])
def test_c34_a_prompt_that_does_not_come_is_lost_for_the_reason_that_the_decode_worker_gives(
    word: RequestOutput,
) -> None:
    attempt = make_attempt()
    assert not attempt.take("d", error(ErrorKind.KV_LOAD_FAILED, "no piece came"))
    assert attempt.leg_to_abort() == "p", "so that it has the last word soon"
    assert attempt.leg_to_abort() is None
    with pytest.raises(AttemptFailed, match="no piece came") as caught:
        attempt.take("p", word)
    assert (caught.value.worker, caught.value.cause) == ("p", Cause.FAILED)
    assert caught.value.is_prompt_lost


def test_c34_a_prefill_worker_that_is_lost_does_not_have_to_say_why_its_prompt_did_not_come() -> None:
    attempt = make_attempt()
    assert not attempt.take("d", error(ErrorKind.KV_LOAD_FAILED))
    with pytest.raises(AttemptFailed) as caught:
        attempt.note_loss("p", "killed")
    assert (caught.value.cause, caught.value.is_prompt_lost) == (Cause.LOST, True)


@pytest.mark.parametrize("worker", ["p", "d"])
def test_c52_what_is_lost_with_a_worker_that_was_leaving_is_given_back(worker: str) -> None:
    """It was sent before the gateway heard of the drain, and came when nobody was there to refuse it."""
    with pytest.raises(AttemptFailed) as caught:
        make_attempt().note_loss(worker, "its engine is stopped", was_leaving=True)
    assert (caught.value.cause, caught.value.is_prompt_lost) == (Cause.GIVEN_BACK, False)


def test_c34_a_prompt_that_was_handed_over_and_did_not_come_is_lost_at_once() -> None:
    attempt = make_attempt()
    assert attempt.take("p", tokens(7, finish=FinishReason.HANDED_OVER))
    with pytest.raises(AttemptFailed):
        attempt.take("d", error(ErrorKind.KV_LOAD_FAILED))
    assert attempt.leg_to_abort() is None


def test_c52_who_decodes_needs_no_prefill_worker_even_if_its_last_word_was_lost() -> None:
    attempt = make_attempt()
    assert attempt.take("d", tokens(7, 8))
    attempt.note_loss("p", "killed")
    assert attempt.open_legs == {"d"}
    attempt.check_under_way()
    with pytest.raises(AttemptFailed):
        attempt.note_loss("d", "killed")


@pytest.mark.parametrize("kind", [ErrorKind.GIVEN_BACK, ErrorKind.INTERNAL, ErrorKind.OVERLOADED])
def test_c52_who_decodes_goes_on_whatever_its_prefill_worker_says_after_that(kind: ErrorKind) -> None:
    attempt = make_attempt()
    assert attempt.take("d", tokens(7, 8))
    assert not attempt.take("p", error(kind))
    assert not attempt.take("p", tokens(9, finish=FinishReason.HANDED_OVER)), "it may be another token 0"
    assert attempt.open_legs == {"d"}
    with pytest.raises(AttemptFailed):
        attempt.take("d", aborted())
