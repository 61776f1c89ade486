"""Single events and their effects; random ones are in tests/property/test_dispatcher_machine.py."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest, RateLimited
from baton.kv import TransferRole
from baton.request import ErrorKind, FinishReason, StageTimes
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from baton.worker import KVBlockCounts, WorkerRole, WorkerState
from gateway.auth.callers import Caller
from gateway.requests.events import (
    AbortAt,
    Deliver,
    Record,
    Refuse,
    StreamEnded,
    Submitted,
    SubmitTo,
    WorkerLost,
    WorkerOutputs,
    WorkerReported,
)
from gateway.requests.record import Outcome
from gateway.requests.retry import RetryState
from gateway.routing.placement import Mode, Placement, RouteQuery
from gateway.workers.worker_listener import LossCause
from tests.factories.dispatching import killed, make_dispatcher, make_request, outputs, submitted
from tests.factories.routing import status


def test_a_token_that_comes_with_the_failure_of_its_attempt_is_delivered() -> None:
    """The token counts as delivered, so the next attempt goes on behind it."""
    dispatcher, request = make_dispatcher("p0", "d0"), make_request()
    engine_id = submitted(dispatcher.handle(Submitted(request), 0.0))["d0"]
    assert dispatcher.handle(outputs("d0", engine_id, end=FinishReason.ABORT), 1.0) == []
    effects = dispatcher.handle(outputs("p0", engine_id, 7, end=FinishReason.HANDED_OVER), 2.0)
    assert isinstance(effects[0], Deliver)
    assert effects[0].delta.token_ids == (7,)
    moved = [effect.sub_request for effect in effects if isinstance(effect, SubmitTo)]
    assert {sub_request.output_token_ids for sub_request in moved} == {(7,)}


def test_a_stop_ends_the_other_sub_request_and_an_end_is_recorded_once() -> None:
    dispatcher, request = make_dispatcher("p0", "d0"), make_request()
    engine_id = submitted(dispatcher.handle(Submitted(request), 0.0))["d0"]
    delivered, aborted = dispatcher.handle(outputs("p0", engine_id, 2, end=FinishReason.STOP), 1.0)
    assert isinstance(delivered, Deliver)
    assert delivered.delta.finish is not None
    assert aborted == AbortAt("d0", engine_id)
    assert dispatcher.num_in_flight == 1, "its client has yet to read it"
    (recorded,) = dispatcher.handle(StreamEnded(request, None), 2.0)
    assert isinstance(recorded, Record)
    assert recorded.record.outcome is Outcome.FINISHED
    assert dispatcher.num_in_flight == 0


def test_nothing_counts_or_is_kept_of_a_request_that_no_worker_got() -> None:
    dispatcher, caller, refused = make_dispatcher(), Caller("a", tokens_per_minute=3), []
    for has_worker in (False, True, True):
        if has_worker:
            dispatcher.handle(WorkerReported(status("d0")), 0.0)
        effects = dispatcher.handle(Submitted(request := make_request(caller=caller)), 0.0)
        refused.append([type(effect.error) for effect in effects if isinstance(effect, Refuse)])
        dispatcher.handle(StreamEnded(request, GeneratorExit()), 0.0)
        assert not dispatcher._open._admitted
    assert refused == [[], [], [RateLimited]], "the second one used up the rate"


def test_a_request_ran_on_a_worker_until_its_part_there_ended() -> None:
    dispatcher, request = make_dispatcher("p0", "d0"), make_request()
    engine_id = submitted(dispatcher.handle(Submitted(request), 0.0))["d0"]
    dispatcher.handle(outputs("p0", engine_id, 7, end=FinishReason.HANDED_OVER), 1.0)
    lost = [dispatcher._open.lost_with(status(worker)) for worker in ("p0", "d0")]
    assert [len(loss.running) for loss in lost] == [0, 1]
    assert lost[0].ever_placed == lost[1].ever_placed


def test_a_request_moves_when_the_loss_of_its_prefill_worker_leaves_it_without_any() -> None:
    """Its decode worker had ended the decode request, and sent a token late."""
    dispatcher, request = make_dispatcher("p0", "d0", "d1"), make_request()
    placed = submitted(dispatcher.handle(Submitted(request), 0.0))
    (decode,) = placed.keys() - {"p0"}
    failed = outputs(decode, placed[decode], end=FinishReason.ERROR)
    failed.outputs[0].error_kind = ErrorKind.KV_LOAD_FAILED
    assert dispatcher.handle(failed, 1.0) == [AbortAt("p0", placed["p0"])]
    dispatcher.handle(outputs(decode, placed[decode], 7), 2.0)
    assert submitted(dispatcher.handle(killed("p0"), 3.0)), "it goes on elsewhere"


def test_a_request_moves_at_once_when_its_worker_is_lost() -> None:
    dispatcher, request = make_dispatcher("d0", "d1"), make_request()
    ((worker, engine_id),) = submitted(dispatcher.handle(Submitted(request), 0.0)).items()
    dispatcher.handle(outputs(worker, engine_id, 7), 1.0)
    effects = dispatcher.handle(killed(worker), 2.0)
    assert effects[0] == AbortAt(worker, engine_id), "the worker may still be reachable"
    assert submitted(effects).keys() == {"d0", "d1"} - {worker}
    late = outputs(worker, engine_id, 7, 8)
    assert dispatcher.handle(late, 3.0) == [], "its later outputs reach no client"


def test_a_request_that_is_refused_on_arrival_is_recorded_as_rejected() -> None:
    caller = Caller("a", max_concurrent=1)
    dispatcher, first = make_dispatcher("d0"), make_request(caller=caller)
    dispatcher.handle(Submitted(first), 0.0)
    for request_id, kind in (("r", InvalidRequest), ("other", RateLimited)):
        request = make_request(request_id, caller)
        (refused,) = dispatcher.handle(Submitted(request), 1.0)
        assert isinstance(refused, Refuse)
        assert isinstance(refused.error, kind)
        (recorded,) = dispatcher.handle(StreamEnded(request, refused.error), 1.0)
        assert isinstance(recorded, Record)
        assert recorded.record.outcome is Outcome.REJECTED
    assert dispatcher.requests_of("r", caller) == [first]


def test_a_request_that_no_worker_can_run_delays_none_with_other_needs() -> None:
    dispatcher = make_dispatcher("d0")
    dispatcher.handle(WorkerReported(status("d0", state=WorkerState.DRAINING)), 0.0)
    modes = {"needs a prefill worker": Mode.DISAGGREGATED, "needs none": Mode.LOCAL}
    for name, mode in modes.items():
        assert submitted(dispatcher.handle(Submitted(replace(make_request(name), mode=mode)), 0.0)) == {}
    effects = dispatcher.handle(WorkerReported(status("d0")), 1.0)
    assert [engine_id.partition(".")[0] for engine_id in submitted(effects).values()] == ["needs none"]


def test_a_bug_in_routing_one_request_of_a_sweep_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep follows a heartbeat: an error that left it would close the connection to the worker."""
    dispatcher, cursed, healthy = make_dispatcher(), make_request("cursed"), make_request("healthy")
    for request in (cursed, healthy):
        assert dispatcher.handle(Submitted(request), 0.0) == []
    route, bug = dispatcher.router.route, ZeroDivisionError("a bug")

    def route_or_fail(query: RouteQuery) -> Placement:
        if query.cache_salt == cursed.cache_salt:
            raise bug
        return route(query)

    monkeypatch.setattr(dispatcher.router, "route", route_or_fail)
    effects = dispatcher.handle(WorkerReported(status("d0")), 1.0)
    assert [effect for effect in effects if isinstance(effect, Refuse)] == [Refuse(cursed, bug)]
    assert submitted(effects).keys() == {"d0"}
    assert (dispatcher.num_queued, dispatcher.num_in_flight) == (0, 2)
    (recorded,) = dispatcher.handle(StreamEnded(cursed, bug), 2.0)
    assert isinstance(recorded, Record)
    assert recorded.record.outcome is Outcome.REJECTED


@pytest.mark.parametrize("method", ["on_failure", "begin"])
def test_a_bug_in_moving_one_request_of_a_lost_worker_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    dispatcher, cursed, healthy = make_dispatcher("d0"), make_request("cursed"), make_request("healthy")
    for request in (cursed, healthy):
        dispatcher.handle(Submitted(request), 0.0)
    dispatcher.handle(WorkerReported(status("d1")), 0.0)
    original, bug = getattr(RetryState, method), ZeroDivisionError("a bug")

    def fail_or_go_on(retry: RetryState, *args: Any) -> Any:
        if retry._request is cursed:
            raise bug
        return original(retry, *args)

    monkeypatch.setattr(RetryState, method, fail_or_go_on)
    effects = dispatcher.handle(killed("d0"), 1.0)
    assert [effect for effect in effects if isinstance(effect, Refuse)] == [Refuse(cursed, bug)]
    assert [effect.worker for effect in effects if isinstance(effect, SubmitTo)] == ["d1"]
    assert (dispatcher.num_queued, dispatcher.num_in_flight) == (0, 2)


def link_failure(engine_id: str, *token_ids: int) -> WorkerOutputs:
    """The output of d0, whose prompt did not come from p0. If it has tokens, d0 recomputed the prompt."""
    record = TransferRecord(
        role=TransferRole.CONSUMER,
        peer="p0",
        attempt=0,
        events=(TransferEvent(TransferEventKind.FAILED, 5.0),),
        reason="silence",
        is_link_failure=True,
    )
    output = outputs("d0", engine_id, *token_ids).outputs[0]
    output.stage_times = StageTimes(transfers=(record,))
    if not token_ids:
        output.finish_reason, output.error_kind = FinishReason.ERROR, ErrorKind.KV_LOAD_FAILED
    return WorkerOutputs("d0", (output,))


def test_c42_a_link_that_failed_one_request_is_spared_the_next() -> None:
    dispatcher = make_dispatcher("p0", "d0", "d1")
    placed = submitted(dispatcher.handle(Submitted(make_request("a")), 0.0))
    assert placed.keys() == {"p0", "d0"}
    dispatcher.handle(link_failure(placed["d0"]), 5.0)
    assert dispatcher.avoided_pairs.at(5.0) == {("p0", "d0")}
    for name in "bcd":
        assert submitted(dispatcher.handle(Submitted(make_request(name)), 6.0)).keys() == {"p0", "d1"}
    dispatcher.handle(WorkerLost("p0", LossCause.SILENT, "silent"), 7.0)
    assert len(dispatcher.avoided_pairs) == 0, "the worker was the cause"


def test_c42_a_worker_in_a_new_role_has_other_pairs() -> None:
    dispatcher = make_dispatcher("p0", "d0", "d1")
    placed = submitted(dispatcher.handle(Submitted(make_request("a")), 0.0))
    dispatcher.handle(link_failure(placed["d0"]), 5.0)
    assert len(dispatcher.avoided_pairs) == 1
    prefill = status("p0")
    dispatcher.handle(WorkerReported(replace(prefill, state=WorkerState.DRAINING)), 6.0)
    assert len(dispatcher.avoided_pairs) == 1
    dispatcher.handle(WorkerReported(replace(prefill, role=WorkerRole.DECODE)), 7.0)
    assert len(dispatcher.avoided_pairs) == 0


@pytest.mark.parametrize("returns_as", [None, "the next incarnation", "the same incarnation"])
def test_c42_a_link_that_failed_since_its_prefill_worker_was_lost_is_not_blamed(
    returns_as: str | None,
) -> None:
    """The decode worker computes the prompt itself, so its report comes after the loss, or after the worker's return
    from a restart or a standstill."""
    dispatcher = make_dispatcher("p0", "d0", policy="recompute")
    engine_id = submitted(dispatcher.handle(Submitted(make_request()), 0.0))["d0"]
    dispatcher.handle(WorkerLost("p0", LossCause.SILENT, "silent"), 4.0)
    if returns_as is not None:
        same = returns_as == "the same incarnation"
        dispatcher.handle(WorkerReported(status("p0", incarnation="incarnation" if same else "next")), 4.5)
    dispatcher.handle(link_failure(engine_id, 7), 5.0)
    assert len(dispatcher.avoided_pairs) == 0


def test_c42_a_failure_that_two_outputs_report_counts_once() -> None:
    """The first token after a recomputation reports it, and so does the finish, which may come after a pause."""
    dispatcher = make_dispatcher("p0", "d0")
    engine_id = submitted(dispatcher.handle(Submitted(make_request()), 0.0))["d0"]
    dispatcher.handle(link_failure(engine_id, 7), 5.0)
    dispatcher.avoided_pairs.works(("p0", "d0"))
    dispatcher.handle(link_failure(engine_id, 7, 8), 50.0)
    assert len(dispatcher.avoided_pairs) == 0


def test_requests_of_a_lost_worker_go_on_in_the_order_of_the_queue() -> None:
    dispatcher = make_dispatcher("d0")
    for name, priority in (("idle", 1), ("urgent", 0)):
        dispatcher.handle(Submitted(replace(make_request(name), priority=priority)), 0.0)
    dispatcher.handle(WorkerReported(replace(status("d1"), kv_blocks=KVBlockCounts(1, 1, 0, 0))), 1.0)
    assert submitted(dispatcher.handle(killed("d0"), 2.0))["d1"].startswith("urgent.")
    assert dispatcher.num_queued == 1


@pytest.mark.parametrize(
    ("has_requests", "was_draining", "cause", "logged"),
    [
        (True, True, LossCause.LEFT, ("WARNING", "lost the requests on worker d0: why")),
        (False, True, LossCause.LEFT, ("INFO", "worker d0 has left after its drain: why")),
        (False, False, LossCause.LEFT, ("INFO", "worker d0 has left: why")),  # sooner than its heartbeat
        (True, False, LossCause.DIED, ("WARNING", "lost the requests on worker d0: why")),
        (
            False,
            False,
            LossCause.DIED,
            ("WARNING", "worker d0, which had no requests of this gateway, is lost: why"),
        ),
    ],
)
def test_only_losses_are_logged_as_such(
    has_requests: bool,
    was_draining: bool,
    cause: LossCause,
    logged: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker that leaves after its drain, without a request, is no loss, whatever the gateway learns first."""
    dispatcher = make_dispatcher("d0")
    if has_requests:
        assert submitted(dispatcher.handle(Submitted(make_request()), 0.0))
    if was_draining:
        dispatcher.handle(WorkerReported(status("d0", state=WorkerState.DRAINING)), 1.0)
    with caplog.at_level(logging.INFO, "gateway.requests.fleet_knowledge"):
        dispatcher.handle(WorkerLost("d0", cause, "why"), 2.0)
    (line,) = [record for record in caplog.records if record.__dict__.get("worker") == "d0"]
    assert (line.levelname, line.getMessage()) == logged
