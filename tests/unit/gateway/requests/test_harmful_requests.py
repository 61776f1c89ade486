"""Behaviour 56 at the dispatcher: requests that end workers, or break their steps, and those that only seem to."""

from dataclasses import replace

import pytest

from baton.errors import HarmfulRequest
from baton.request import ErrorKind, FinishReason, RequestOutput
from baton.worker import WorkerState
from gateway.auth.callers import Caller
from gateway.requests.events import (
    Deliver,
    Refuse,
    StreamEnded,
    Submitted,
    WorkerLost,
    WorkerOutputs,
    WorkerReported,
)
from gateway.workers.worker_listener import LossCause
from tests.factories.dispatching import killed, make_dispatcher, make_request, outputs, submitted
from tests.factories.routing import status


def test_c56_a_request_that_ends_workers_is_stopped_with_its_equals_and_refused_later() -> None:
    dispatcher, caller = make_dispatcher("d0", "d1", "d2", "d3", "d4", "d5"), Caller("mallory")
    poison, equal = (replace(make_request(name, caller), cache_salt="same") for name in ("poison", "equal"))
    bystander = replace(make_request("bystander"), prompt_token_ids=(9,))
    (worker,) = submitted(dispatcher.handle(Submitted(poison), 0.0))
    for now in (1.0, 2.0):
        ((worker, engine_id),) = submitted(dispatcher.handle(killed(worker), now)).items()
    assert submitted(dispatcher.handle(Submitted(bystander), 2.5)), "only suspects wait for each other"
    assert dispatcher.handle(Submitted(equal), 2.5) == [], "one at a time"
    for now in (2.7, 2.8):
        dispatcher.handle(WorkerReported(replace(status(worker), suspects=(engine_id,))), now)
        ((worker, engine_id),) = submitted(dispatcher.handle(killed(worker), now)).items()
    dispatcher.handle(WorkerReported(replace(status(worker), suspects=(engine_id,))), 2.9)
    effects = dispatcher.handle(killed(worker), 3.0)
    refused = {effect.request: effect.error for effect in effects if isinstance(effect, Refuse)}
    assert refused.keys() == {poison, equal}
    assert {type(error) for error in refused.values()} == {HarmfulRequest}
    for request, error in refused.items():
        dispatcher.handle(StreamEnded(request, error), 3.0)
    (again,) = dispatcher.handle(Submitted(equal), 4.0)
    assert isinstance(again, Refuse)
    assert isinstance(again.error, HarmfulRequest)


@pytest.mark.parametrize("are_others_lost", [False, True])
def test_c56_a_request_is_not_stopped_if_as_many_workers_end_that_never_had_it(are_others_lost: bool) -> None:
    names = [f"d{number}" for number in range(9)]
    dispatcher, unused = make_dispatcher(*names), set(names)
    effects = dispatcher.handle(Submitted(make_request()), 0.0)
    for now in range(5):
        ((worker, engine_id),) = submitted(effects).items()
        unused.discard(worker)
        dispatcher.handle(WorkerReported(replace(status(worker), suspects=(engine_id,))), now)
        if are_others_lost:
            other = min(unused)
            dispatcher.handle(killed(other), now)
            dispatcher.handle(WorkerReported(status(other)), now)
        effects = dispatcher.handle(killed(worker), now)
    assert any(isinstance(effect, Refuse) for effect in effects) is not are_others_lost


@pytest.mark.parametrize(("others", "num_shared"), [((), 0), (("another gateway's",), 1)])
def test_c56_a_worker_that_ran_one_suspect_counts_even_if_the_other_worker_refused_it(
    others: tuple[str, ...], num_shared: int
) -> None:
    dispatcher = make_dispatcher("p0", "p1", "d0", "d1")
    request = make_request()
    placed = submitted(dispatcher.handle(Submitted(request), 0.0))
    for now in (1.0, 2.0):
        placed = submitted(dispatcher.handle(killed(next(iter(placed))), now))
        for name in ("d0", "d1"):
            dispatcher.handle(WorkerReported(status(name)), now)
    (suspect,) = dispatcher.suspects._suspects.values()
    decode, prefill = placed
    dispatcher.handle(WorkerReported(replace(status(prefill), suspects=(placed[prefill], *others))), 3.0)
    refused = RequestOutput(
        request_id=placed[decode],
        first_position=0,
        finish_reason=FinishReason.ERROR,
        error="another suspect's turn",
        error_kind=ErrorKind.OVERLOADED,
    )
    dispatcher.handle(WorkerOutputs(decode, (refused,)), 3.1)
    dispatcher.handle(killed(prefill), 3.2)
    assert (suspect.num_losses, suspect.num_shared) == (3, num_shared)


@pytest.mark.parametrize("busy", ["p0", "d0"])
def test_c56_a_suspect_waits_while_it_is_anothers_turn_and_delays_nobody(busy: str) -> None:
    dispatcher = make_dispatcher("p0", "d0")
    dispatcher.handle(Submitted(make_request()), 0.0)
    for now in (1.0, 2.0):
        dispatcher.handle(WorkerReported(replace(status(busy), takes_suspects=now < 2.0)), now)
        dispatcher.handle(killed("d0"), now)
        dispatcher.handle(WorkerReported(replace(status("d0"), takes_suspects=busy != "d0")), now)
    assert dispatcher.num_queued == 1
    assert dispatcher.queue.oldest_since(for_worker=True) is None
    bystander = replace(make_request("bystander"), prompt_token_ids=(9,))
    assert submitted(dispatcher.handle(Submitted(bystander), 2.5))
    assert submitted(dispatcher.handle(WorkerReported(status(busy)), 3.0))


@pytest.mark.parametrize(
    ("is_drain_known", "cause"),
    [(True, LossCause.DISCONNECTED), (False, LossCause.LEFT), (False, LossCause.SESSION_LOST)],
)
def test_c56_workers_that_drain_or_live_on_count_against_no_request(
    is_drain_known: bool, cause: LossCause
) -> None:
    dispatcher, request = make_dispatcher("d0", "d1", "d2"), make_request()
    (worker,) = submitted(dispatcher.handle(Submitted(request), 0.0))
    for now in range(5):
        if is_drain_known:
            dispatcher.handle(WorkerReported(status(worker, state=WorkerState.DRAINING)), now)
        lost, former = WorkerLost(worker, cause, "why"), worker
        (worker,) = submitted(dispatcher.handle(lost, now))
        dispatcher.handle(WorkerReported(status(former)), now)
    assert len(dispatcher.suspects) == 0
    how = "lost" if cause is LossCause.SESSION_LOST else "given_back"
    assert dispatcher.tally.counters[f"migrated_{how}"] == 5


def test_c56_a_worker_that_serves_again_after_a_drain_is_lost_as_any_other() -> None:
    dispatcher, request = make_dispatcher("d0", "d1"), make_request()
    for worker in ("d0", "d1"):  # drained to change its role
        dispatcher.handle(WorkerReported(status(worker, state=WorkerState.DRAINING)), 0.0)
        dispatcher.handle(WorkerReported(status(worker)), 1.0)
    (worker,) = submitted(dispatcher.handle(Submitted(request), 2.0))
    dispatcher.handle(killed(worker), 3.0)
    assert len(dispatcher.suspects) == 1


@pytest.mark.parametrize(("have_answered", "num_attempts"), [(True, 2), (False, 3)])
def test_c56_a_request_that_two_workers_cannot_compute_is_stopped_if_they_can_compute_others(
    have_answered: bool, num_attempts: int
) -> None:
    dispatcher, request = make_dispatcher("d0", "d1", "d2"), make_request()
    if have_answered:
        for number in range(3):
            other = replace(make_request(f"other {number}"), prompt_token_ids=(number,))
            ((worker, engine_id),) = submitted(dispatcher.handle(Submitted(other), 0.0)).items()
            effects = dispatcher.handle(outputs(worker, engine_id, 1, 2, 3, end=FinishReason.LENGTH), 0.5)
            assert any(isinstance(effect, Deliver) for effect in effects)
    effects = dispatcher.handle(Submitted(request), 1.0)
    for now in range(num_attempts):
        ((worker, engine_id),) = submitted(effects).items()
        failed = outputs(worker, engine_id, end=FinishReason.ERROR)
        failed.outputs[0].error_kind = ErrorKind.STEP_FAILED
        effects = dispatcher.handle(failed, 2.0 + now)
    (refused,) = [effect for effect in effects if isinstance(effect, Refuse)]
    assert isinstance(refused.error, HarmfulRequest) is have_answered
