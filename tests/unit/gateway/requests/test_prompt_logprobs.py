"""The prompt's log-probabilities come with token 0, from the prefill worker; nothing is delivered before them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.kv import OnLoadFailure
from baton.request import ErrorKind, FinishReason, PackedLogprobs, RequestOutput, TokenLogprobs
from baton.sampling import SamplingParams
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import Deliver, Effect, Submitted, SubmitTo, WorkerOutputs
from gateway.requests.request import Delta
from gateway.requests.retry import LoadFailurePolicy
from tests.factories.dispatching import killed, make_dispatcher, make_request, outputs, submitted

PROMPT_LOGPROBS = PackedLogprobs.of(TokenLogprobs(token_id, -1.0, 1, ()) for token_id in (2, 3))
HANDED_OVER = FinishReason.HANDED_OVER


def begun(
    *workers: str, policy: LoadFailurePolicy = "retry"
) -> tuple[Dispatcher, dict[str, str], list[Effect]]:
    """A dispatcher with one placed request that wants its prompt's log-probabilities."""
    dispatcher = make_dispatcher(*workers, policy=policy)
    params = SamplingParams(max_tokens=3, seed=0, prompt_logprobs=0)
    effects = dispatcher.handle(Submitted(replace(make_request(), sampling_params=params)), 0.0)
    return dispatcher, submitted(effects), effects


def with_prompt_logprobs(
    worker: str, engine_id: str, token_id: int, end: FinishReason | None
) -> WorkerOutputs:
    output = RequestOutput(
        request_id=engine_id,
        first_position=0,
        token_ids=(token_id,),
        finish_reason=end,
        prompt_logprobs=PROMPT_LOGPROBS,
    )
    return WorkerOutputs(worker, (output,))


def deltas(effects: Sequence[Effect]) -> list[Delta]:
    return [effect.delta for effect in effects if isinstance(effect, Deliver)]


def test_they_come_with_the_prefill_workers_token() -> None:
    dispatcher, placed, _ = begun("p0", "d0")
    (first,) = deltas(dispatcher.handle(with_prompt_logprobs("p0", placed["p0"], 7, HANDED_OVER), 1.0))
    assert (first.token_ids, first.prompt_logprobs) == ((7,), PROMPT_LOGPROBS)
    assert deltas(dispatcher.handle(outputs("d0", placed["d0"], 7), 1.0)) == []
    (second,) = deltas(dispatcher.handle(outputs("d0", placed["d0"], 7, 8), 2.0))
    assert (second.token_ids, second.prompt_logprobs) == ((8,), None)


def test_what_the_decode_worker_sends_earlier_waits_for_them() -> None:
    dispatcher, placed, _ = begun("p0", "d0")
    assert dispatcher.handle(outputs("d0", placed["d0"], 7), 1.0) == []
    assert dispatcher.handle(outputs("d0", placed["d0"], 7, 8, 9, end=FinishReason.LENGTH), 1.1) == []
    first, second = deltas(dispatcher.handle(with_prompt_logprobs("p0", placed["p0"], 7, HANDED_OVER), 1.2))
    assert (first.token_ids, first.prompt_logprobs) == ((7,), PROMPT_LOGPROBS)
    assert (second.token_ids, second.prompt_logprobs) == ((8, 9), None)
    assert second.finish is not None


def test_a_lost_prefill_worker_is_needed_until_they_have_come() -> None:
    """This holds although the decode worker has answered."""
    dispatcher, placed, _ = begun("p0", "p1", "d0")
    (prefill,) = placed.keys() - {"d0"}
    dispatcher.handle(outputs("d0", placed["d0"], 7), 1.0)
    again = submitted(dispatcher.handle(killed(prefill), 2.0))
    (other,) = again.keys() - {"d0"}
    assert other != prefill
    (first,) = deltas(dispatcher.handle(with_prompt_logprobs(other, again[other], 6, HANDED_OVER), 3.0))
    assert first.token_ids == (6,), "what came before the loss is dropped"


def test_an_answer_that_ends_with_token_0_drops_what_was_held_back() -> None:
    dispatcher, placed, _ = begun("p0", "d0")
    dispatcher.handle(outputs("d0", placed["d0"], 7), 1.0)
    (only,) = deltas(dispatcher.handle(with_prompt_logprobs("p0", placed["p0"], 7, FinishReason.STOP), 1.1))
    assert only.finish is not None


@pytest.mark.parametrize("policy", ["retry", "recompute"])
def test_a_decode_worker_never_computes_such_a_prompt_in_place_of_the_prefill_worker(
    policy: LoadFailurePolicy,
) -> None:
    _, _, effects = begun("p0", "d0", policy=policy)
    asked = [effect.sub_request.kv_transfer for effect in effects if isinstance(effect, SubmitTo)]
    assert {each.on_failure for each in asked if each} == {OnLoadFailure.REPORT}


def test_a_failure_of_the_decode_worker_is_not_held_back() -> None:
    dispatcher, placed, _ = begun("p0", "d0", "d1")
    (decode,) = placed.keys() - {"p0"}
    failed = outputs(decode, placed[decode], end=FinishReason.ERROR)
    failed.outputs[0].error_kind = ErrorKind.INTERNAL
    assert submitted(dispatcher.handle(failed, 1.0))


def test_a_worker_that_does_everything_brings_them_itself() -> None:
    dispatcher, placed, _ = begun("d0")
    (first,) = deltas(dispatcher.handle(with_prompt_logprobs("d0", placed["d0"], 7, None), 1.0))
    assert first.prompt_logprobs == PROMPT_LOGPROBS


def test_the_next_attempt_behind_token_0_awaits_none() -> None:
    dispatcher, placed, _ = begun("p0", "d0", "d1")
    dispatcher.handle(with_prompt_logprobs("p0", placed["p0"], 7, HANDED_OVER), 1.0)
    (decode,) = placed.keys() - {"p0"}
    again = submitted(dispatcher.handle(killed(decode), 2.0))
    (other,) = again.keys() - {"p0"}
    output = RequestOutput(request_id=again[other], first_position=1, token_ids=(8,))
    (delta,) = deltas(dispatcher.handle(WorkerOutputs(other, (output,)), 3.0))
    assert (delta.token_ids, delta.prompt_logprobs) == ((8,), None)
