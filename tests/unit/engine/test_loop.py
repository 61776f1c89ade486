"""The engine's thread: what commands lead to, when it sleeps, and what ends it."""

import threading
import time

import pytest

from baton.request import ErrorKind, FinishReason
from baton.step import SchedulerOutput
from decode_worker import DecodeWorker
from tests.factories.engine import RunningLoop, StepHook, make_core, make_engine_request


def test_a_request_runs_to_its_end_and_its_client_hears_every_token() -> None:
    with RunningLoop() as running:
        running.loop.submit("gateway", make_engine_request(max_tokens=3))
        news = [running.next_output() for _ in range(3)]
        assert [client for client, _ in news] == ["gateway"] * 3
        assert [output.first_position for _, output in news] == [0, 1, 2]
        last = news[-1][1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.stage_times is not None
        assert last.stage_times.prefill_s > 0.0


def test_an_abort_ends_only_the_clients_own_requests() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: SchedulerOutput) -> None:
        entered.set()
        assert go_on.wait(10)

    with RunningLoop(make_core(StepHook(hold))) as running:
        running.loop.submit("a", make_engine_request("mine", max_tokens=500))
        assert entered.wait(10)
        running.loop.abort("b", ("mine",))
        running.loop.submit("b", make_engine_request("theirs", max_tokens=500))
        running.loop.abort_client("b")
        go_on.set()
        assert running.until_finished("theirs").finish_reason is FinishReason.ABORT
        running.loop.abort("a", ("mine", "unknown"))
        assert running.until_finished("mine").finish_reason is FinishReason.ABORT


def test_a_deadline_ends_a_request_by_itself() -> None:
    def take_time(_: SchedulerOutput) -> None:
        threading.Event().wait(0.01)

    with RunningLoop(make_core(StepHook(take_time))) as running:
        running.loop.submit("gateway", make_engine_request(max_tokens=1_900, timeout_s=0.05))
        last = running.until_finished("r")
        assert (last.finish_reason, last.error) == (FinishReason.ABORT, "the request's deadline passed")


@pytest.mark.parametrize(
    ("request_id", "num_tokens", "kind", "complaint"),
    [
        ("r", 10, ErrorKind.INVALID_REQUEST, "request_id: r is in use"),
        ("big", 5_000, ErrorKind.INVALID_REQUEST, "prompt: 5000 tokens"),
        ("late", 10, ErrorKind.OVERLOADED, "requests wait to decode"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_its_reason(
    request_id: str, num_tokens: int, kind: ErrorKind, complaint: str
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: SchedulerOutput) -> None:
        entered.set()
        assert go_on.wait(10)

    core = make_core(StepHook(hold), max_num_seqs=1)
    with RunningLoop(core, DecodeWorker(max_waiting=1 if request_id == "late" else 9)) as running:
        running.loop.submit("gateway", make_engine_request("r", max_tokens=500))
        assert entered.wait(10)
        running.loop.submit("gateway", make_engine_request("waits"))
        running.loop.submit("gateway", make_engine_request(request_id, num_tokens))
        go_on.set()
        while (output := running.next_output()[1]).error is None:
            continue
        assert (output.request_id, output.finish_reason, output.error_kind) == (
            request_id,
            FinishReason.ERROR,
            kind,
        )
        assert complaint in (output.error or "")


def test_c48_an_idle_loop_uses_no_cpu_and_wakes_at_once() -> None:
    with RunningLoop() as running:
        running.loop.submit("gateway", make_engine_request("first", max_tokens=1))
        running.until_finished("first")
        before = time.process_time()
        assert not threading.Event().wait(0.3)
        assert time.process_time() - before < 0.1
        running.loop.submit("gateway", make_engine_request("second", max_tokens=1))
        running.until_finished("second")


def test_a_failed_step_ends_its_requests_and_the_next_one_is_served() -> None:
    failures = iter([True])

    def fail_once(_: SchedulerOutput) -> None:
        if next(failures, False):
            raise RuntimeError("the device is on fire")

    with RunningLoop(make_core(StepHook(fail_once))) as running:
        running.loop.submit("gateway", make_engine_request("first"))
        last = running.until_finished("first")
        assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.INTERNAL)
        running.loop.submit("gateway", make_engine_request("second"))
        assert running.until_finished("second").finish_reason is FinishReason.LENGTH
        assert running.loop.is_alive


def test_a_device_that_fails_again_and_again_ends_the_loop() -> None:
    def fail(_: SchedulerOutput) -> None:
        raise RuntimeError("the device is gone")

    running = RunningLoop(make_core(StepHook(fail)))
    running.loop.start()
    for name in ("a", "b"):
        running.loop.submit("gateway", make_engine_request(name))
        running.until_finished(name)
    running.loop.submit("gateway", make_engine_request("c"))
    running.loop.join(10)
    assert not running.loop.is_alive
    assert isinstance(running.loop.failure, RuntimeError)
    assert running.loop.drain(0.0), "nobody is left to wait for"


def test_c50_draining_refuses_new_requests_and_waits_for_the_running_ones() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: SchedulerOutput) -> None:
        entered.set()
        assert go_on.wait(10)

    with RunningLoop(make_core(StepHook(hold))) as running:
        running.loop.submit("gateway", make_engine_request("running"))
        assert entered.wait(10)
        assert not running.loop.drain(0.05)
        running.loop.submit("gateway", make_engine_request("late"))
        go_on.set()
        assert running.until_finished("late").error_kind is ErrorKind.OVERLOADED
        assert running.loop.drain(10)
        assert running.loop.snapshot.is_drained
