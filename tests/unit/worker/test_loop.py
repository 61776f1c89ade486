"""The engine's thread: what commands lead to, when it sleeps, and what ends it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import pytest

from baton.block_hash import SHORT_HASH_BYTES, block_hashes
from baton.errors import BatonError, FleetError
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import ErrorKind, FinishReason
from baton.step import KVConnectorOutput, SchedulerOutput
from baton.worker import WorkerRole
from decode_worker import DecodeRole
from prefill_worker import PrefillRole
from tests.factories.engine import (
    FakeBlockMover,
    Held,
    RunningLoop,
    StepHook,
    make_core,
    make_engine_request,
)
from worker.kv_events import KVChange

T = TypeVar("T")


def test_a_request_runs_to_its_end_and_its_client_gets_every_token() -> None:
    with RunningLoop() as running:
        running.loop.submit("gateway", make_engine_request(max_tokens=3))
        news = [running.next_output() for _ in range(3)]
        assert [client for client, _ in news] == ["gateway"] * 3
        assert [output.first_position for _, output in news] == [0, 1, 2]
        last = news[-1][1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.stage_times is not None
        assert last.stage_times.prefill_s > 0.0
        running.loop.submit("gateway", make_engine_request())
        assert running.next_finish().finish_reason is FinishReason.LENGTH, "its id is free again"


def test_an_abort_ends_only_the_clients_own_requests(caplog: pytest.LogCaptureFixture) -> None:
    device = Held()
    with RunningLoop(make_core(StepHook(device))) as running:
        running.loop.submit("a", make_engine_request("mine", max_tokens=500))
        assert device.entered.wait(60)
        running.loop.abort("b", ("mine",))
        running.loop.submit("b", make_engine_request("theirs", max_tokens=500))
        running.loop.abort_client("b")
        running.loop.abort_client("without requests")
        device.go_on.set()
        assert running.until_finished("theirs").finish_reason is FinishReason.ABORT
        running.loop.abort("a", ("mine", "unknown"))
        assert running.until_finished("mine").finish_reason is FinishReason.ABORT
    assert caplog.messages == ["connection b has ended; ending its 1 request(s)"]


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
    device = Held()
    core = make_core(StepHook(device), max_num_seqs=1)
    with RunningLoop(core, DecodeRole(max_waiting=1 if request_id == "late" else 9)) as running:
        running.loop.submit("gateway", make_engine_request("r", max_tokens=500))
        assert device.entered.wait(60)
        running.loop.submit("gateway", make_engine_request("waits"))
        running.loop.submit("gateway", make_engine_request(request_id, num_tokens))
        device.go_on.set()
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
        before = running.cpu_s()
        time.sleep(0.3)
        assert running.cpu_s() - before < 0.1
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
        assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.STEP_FAILED)
        running.loop.submit("gateway", make_engine_request("second"))
        assert running.until_finished("second").finish_reason is FinishReason.LENGTH
        assert running.loop.is_alive


def test_a_device_that_fails_a_known_token_too_ends_the_loop() -> None:
    def fail(_: SchedulerOutput) -> None:
        raise RuntimeError("the device is gone")

    running = RunningLoop(make_core(StepHook(fail)))
    running.loop.start()
    running.loop.submit("gateway", make_engine_request("first"))
    assert running.until_finished("first").error_kind is ErrorKind.GIVEN_BACK
    running.until_ended()
    assert not running.loop.is_alive
    assert isinstance(running.loop.failure, RuntimeError)
    assert running.loop.drain(0.0), "nothing is left to wait for"


def in_background(call: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BatonError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until_draining(running: RunningLoop) -> None:
    while not running.beats.get(timeout=60).is_draining:
        continue


def test_c50_draining_refuses_new_requests_and_waits_for_the_running_ones() -> None:
    device = Held(step_s=0.005)
    with RunningLoop(make_core(StepHook(device))) as running:
        running.loop.submit("gateway", make_engine_request("running", max_tokens=9))
        assert device.entered.wait(60)
        drained = in_background(lambda: running.loop.drain(10))
        device.go_on.set()
        until_draining(running)
        running.loop.submit("gateway", make_engine_request("late"))
        ends = {output.request_id: output for output in (running.next_finish(), running.next_finish())}
        assert (ends["late"].error_kind, ends["late"].error) == (
            ErrorKind.OVERLOADED,
            "this worker is draining",
        )
        assert ends["running"].finish_reason is FinishReason.LENGTH
        assert drained.result(10)
        assert running.loop.snapshot.is_draining
        assert running.loop.drain(0.0), "it stays drained"


def test_c50_what_does_not_end_in_time_is_given_back() -> None:
    device = Held(step_s=0.005)
    device.go_on.set()
    with RunningLoop(make_core(StepHook(device))) as running:
        running.loop.submit("gateway", make_engine_request("long", max_tokens=1_900))
        running.next_output()
        assert running.loop.drain(0.05)
        last = running.until_finished("long")
        assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.GIVEN_BACK)
        assert last.error == "this worker is draining"


def test_c50_a_lease_that_does_not_end_bounds_the_drain() -> None:
    with RunningLoop(make_core(), PrefillRole(9), lease_s=0.2) as running:
        hand_over(running)
        before = time.monotonic()
        assert not running.loop.drain(0.1)
        assert 0.25 < time.monotonic() - before < 30.0
        assert running.loop.snapshot.kv_blocks.leased
        assert running.loop.snapshot.is_draining, "it takes nothing all the same"


def test_c50_a_drain_ends_with_the_last_lease_and_joins_another_one() -> None:
    connector = FakeBlockMover()
    with RunningLoop(make_core(connector=connector), PrefillRole(9), lease_s=30.0) as running:
        hand_over(running)
        drains = [in_background(lambda: running.loop.drain(30.0)) for _ in range(2)]
        until_draining(running)
        assert not any(drain.done() for drain in drains)
        connector.outputs.append(KVConnectorOutput(finished_sending=("p",)))
        running.commands.wake()
        assert [drain.result(5) for drain in drains] == [True, True]


def hand_over(running: RunningLoop, request_id: str = "p") -> None:
    """The request ends, and another worker may read its blocks."""
    peer = WorkerRef("w1", "incarnation", ("tcp://127.0.0.1:1",), 16)
    transfer = KVTransferParams(TransferRole.PRODUCER, "t", 0, peer)
    running.loop.submit("gateway", make_engine_request(request_id, 40, kv_transfer=transfer))
    assert running.until_finished(request_id).finish_reason is FinishReason.HANDED_OVER


def test_a_role_is_exchanged_between_steps_and_the_prefix_cache_is_kept() -> None:
    with RunningLoop(make_core(), DecodeRole(9)) as running:
        running.loop.submit("gateway", make_engine_request("first", 40))
        assert running.until_finished("first").num_cached_tokens == 0
        running.loop.set_role(PrefillRole(9), 5.0)
        assert running.loop.snapshot.role is WorkerRole.PREFILL
        assert not running.loop.snapshot.is_draining
        beat = running.beats.get(timeout=60)
        assert (beat.role, beat.is_draining) == (WorkerRole.PREFILL, False), "gateways learn of it at once"
        running.loop.submit("gateway", make_engine_request("whole"))
        assert running.until_finished("whole").error_kind is ErrorKind.OVERLOADED, "not what it does any more"
        hand_over(running)
        running.loop.abort("gateway", ("p",))
    with RunningLoop(make_core(), DecodeRole(9)) as running:
        for request_id, num_cached in (("first", 0), ("second", 32)):
            running.loop.submit("gateway", make_engine_request(request_id, 40))
            assert running.until_finished(request_id).num_cached_tokens == num_cached
            running.loop.set_role(PrefillRole(9), 5.0)
            running.loop.set_role(DecodeRole(9), 5.0)


def test_a_role_change_that_a_lease_holds_up_is_rolled_back() -> None:
    connector = FakeBlockMover()
    with RunningLoop(make_core(connector=connector), PrefillRole(9), lease_s=0.1) as running:
        hand_over(running)
        with pytest.raises(FleetError, match=r"3 blocks are leased.*serves in its old role"):
            running.loop.set_role(DecodeRole(9), 0.1)
        assert running.loop.snapshot.role is WorkerRole.PREFILL
        assert not running.loop.snapshot.is_draining
        hand_over(running, "next")  # it serves again


def test_while_a_worker_leaves_nothing_else_may_begin() -> None:
    connector = FakeBlockMover()
    with RunningLoop(make_core(connector=connector), PrefillRole(9), lease_s=30.0) as running:
        hand_over(running)
        change = in_background(lambda: running.loop.set_role(DecodeRole(9), 30.0))
        until_draining(running)
        running.loop.submit("gateway", make_engine_request("late"))
        late = running.until_finished("late")
        assert (late.error_kind, late.error) == (
            ErrorKind.OVERLOADED,
            "this worker is changing to a decode worker",
        )
        for call in (lambda: running.loop.drain(1.0), lambda: running.loop.set_role(PrefillRole(9), 1.0)):
            with pytest.raises(FleetError, match="it is changing to a decode worker"):
                call()
        connector.outputs.append(KVConnectorOutput(finished_sending=("p",)))
        running.commands.wake()
        change.result(5)
        assert running.loop.drain(5.0)
        with pytest.raises(FleetError, match="it is draining"):
            running.loop.set_role(PrefillRole(9), 1.0)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_second_call_for_the_same_role_has_the_outcome_of_the_first(is_in_time: bool) -> None:
    """A new controller calls again for what its predecessor began."""
    connector = FakeBlockMover()
    with RunningLoop(make_core(connector=connector), PrefillRole(9), lease_s=30.0) as running:
        hand_over(running)
        changes = [in_background(lambda: running.loop.set_role(DecodeRole(9), 30.0))]
        until_draining(running)
        running.loop._lease_s = 30.0 if is_in_time else 0.0
        timeout_s = 30.0 if is_in_time else 0.1
        changes.append(in_background(lambda: running.loop.set_role(DecodeRole(9), timeout_s)))
        if is_in_time:
            connector.outputs.append(KVConnectorOutput(finished_sending=("p",)))
            running.commands.wake()
        for change in changes:
            if is_in_time:
                change.result(5)
            else:
                with pytest.raises(
                    FleetError, match=r"3 blocks are leased, after .* it serves in its old role"
                ):
                    change.result(5)
        assert running.loop.snapshot.role is (WorkerRole.DECODE if is_in_time else WorkerRole.PREFILL)


def test_an_engine_that_ends_ends_every_wait_and_its_hand_overs() -> None:
    connector = FakeBlockMover()
    running = RunningLoop(make_core(connector=connector), PrefillRole(9), lease_s=30.0)
    running.loop.start()
    hand_over(running)
    change = in_background(lambda: running.loop.set_role(DecodeRole(9), 30.0))
    until_draining(running)
    running.loop.fail(RuntimeError("the request plane ended"))
    with pytest.raises(FleetError, match="its engine has ended"):
        change.result(5)
    running.until_ended()
    assert str(running.loop.failure) == "the request plane ended"
    assert not running.beats.empty(), "gateways learn of it at once"
    assert connector.is_shut_down, "so that peers need not wait for a deadline"
    with pytest.raises(FleetError, match="its engine has ended"):
        running.loop.set_role(DecodeRole(9), 30.0)


def test_a_subscriber_of_the_prefix_cache_gets_a_listing_and_then_changes() -> None:
    with RunningLoop() as running:
        running.loop.submit("gateway", make_engine_request("before", 40))
        running.until_finished("before")
        running.loop.subscribe_kv_events("a")
        readers, listing = running.kv_changes.get(timeout=60)
        assert (readers, listing.is_anew, len(listing.stored)) == (("a",), True, 2 * SHORT_HASH_BYTES)
        running.loop.submit("gateway", make_engine_request("more", 70))
        running.until_finished("more")
        _, change = running.kv_changes.get(timeout=60)
        assert (change.is_anew, change.removed, len(change.stored)) == (False, b"", 2 * SHORT_HASH_BYTES)
        assert block_hashes((7,) * 70, 16, b"k" * 16)[3][:SHORT_HASH_BYTES] == change.stored[-8:]
        running.loop.subscribe_kv_events("b")
        assert running.kv_changes.get(timeout=60) == (
            ("b",),
            KVChange(True, b"", listing.stored + change.stored),
        )


def test_nothing_is_kept_for_subscribers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    monkeypatch.setattr(core.scheduler.kv_events, "take_events", lambda: pytest.fail("no gateway subscribes"))
    with RunningLoop(core) as running:
        running.loop.submit("gateway", make_engine_request("unheard", 40))
        running.until_finished("unheard")
        assert core.scheduler.kv_events._num_pending == 0
    core = make_core()
    with RunningLoop(core) as running:
        running.loop.subscribe_kv_events("a")
        running.kv_changes.get(timeout=60)
        running.loop.abort_client("a")
        running.loop.submit("gateway", make_engine_request("unheard", 40))
        running.until_finished("unheard")
        assert core.scheduler.kv_events._num_pending == 0
        assert running.kv_changes.empty()
