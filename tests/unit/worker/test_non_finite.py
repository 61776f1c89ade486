"""Behaviour 55: a worker whose steps are not finite checks its device, drains if that fails too, and ends."""

import threading

import pytest

from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import ErrorKind, FinishReason
from baton.step import NON_FINITE, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from baton.worker import WorkerRole
from decode_worker import DecodeRole
from prefill_worker import PrefillRole
from tests.factories.engine import FakeBlockMover, RunningLoop, make_core, make_engine_request
from tests.factories.scheduling import FakeRunner
from worker.device_check import CHECKING, MAX_NON_FINITE_STEPS


class WrongFor(FakeRunner):
    """Its logits are not finite for the requests in `wrong`; each step takes a moment."""

    def __init__(self, *request_ids: str) -> None:
        super().__init__()
        self.wrong = set(request_ids)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        threading.Event().wait(0.002)
        sampled = dict(super().execute(plan).sampled_token_ids)
        wrong = self.wrong & sampled.keys()
        for request_id in wrong:
            del sampled[request_id]
        return ModelRunnerOutput(sampled, non_finite=wrong)


def test_c55_after_one_such_step_the_worker_serves_on_and_says_so() -> None:
    core = make_core(WrongFor("wrong"))
    assert core.counters()["non_finite_steps"] == 0
    with RunningLoop(core) as running:
        running.loop.submit("gateway", make_engine_request("wrong"))
        last = running.until_finished("wrong")
        assert (last.finish_reason, last.error_kind, last.error) == (
            FinishReason.ERROR,
            ErrorKind.STEP_FAILED,
            NON_FINITE,
        )
        running.loop.submit("gateway", make_engine_request("right"))
        assert running.until_finished("right").finish_reason is FinishReason.LENGTH
        assert running.loop.snapshot.counters["non_finite_steps"] == 1
        assert not running.loop.snapshot.is_draining


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_c55_a_device_that_fails_its_check_is_at_fault_and_no_request_is(async_scheduling: bool) -> None:
    running = RunningLoop(make_core(WrongFor("wrong", CHECKING), async_scheduling=async_scheduling))
    running.loop.start()
    running.loop.submit("gateway", make_engine_request("bystander", max_tokens=1_900))
    running.loop.submit("gateway", make_engine_request("wrong"))
    ends = {output.request_id: output for output in (running.next_finish(), running.next_finish())}
    assert (ends["wrong"].error_kind, ends["wrong"].error) == (
        ErrorKind.GIVEN_BACK,
        "the device of this worker is at fault",
    )
    assert (ends["bystander"].error_kind, ends["bystander"].error) == (
        ErrorKind.GIVEN_BACK,
        "this worker is draining",
    )
    until_ended(running)
    assert (
        str(running.loop.failure) == f"{NON_FINITE}; the device check also failed: its logits are not finite"
    )
    assert running.loop.drain(0.0), "nothing is left to wait for"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_c55_after_several_the_worker_gives_its_requests_back_though_its_device_passes_its_checks(
    async_scheduling: bool,
) -> None:
    wrong = [f"wrong {number}" for number in range(MAX_NON_FINITE_STEPS)]
    running = RunningLoop(make_core(WrongFor(*wrong), async_scheduling=async_scheduling))
    running.loop.start()
    running.loop.submit("gateway", make_engine_request("bystander", max_tokens=1_900))
    kinds = []
    for name in wrong:
        running.loop.submit("gateway", make_engine_request(name))
        kinds.append(running.until_finished(name).error_kind)
    assert kinds == [*[ErrorKind.STEP_FAILED] * (MAX_NON_FINITE_STEPS - 1), ErrorKind.GIVEN_BACK]
    last = running.until_finished("bystander")
    assert (last.error_kind, last.error) == (ErrorKind.GIVEN_BACK, "this worker is draining")
    until_ended(running)
    assert str(running.loop.failure) == f"{NON_FINITE}, in {MAX_NON_FINITE_STEPS} steps within 0 s"


def test_c55_it_ends_after_a_change_of_role_that_had_begun() -> None:
    """The check fails while the worker leaves its role, and a lease is the last that holds it there."""
    connector = FakeBlockMover()
    device = WrongFor("wrong")
    core = make_core(device, connector, max_num_batched_tokens=16)
    running = RunningLoop(core, PrefillRole(9), lease_s=60.0)
    running.loop.start()
    submit_prefill(running, "leased", num_tokens=10)
    running.until_finished("leased")
    submit_prefill(running, "wrong", num_tokens=1_500)
    change = threading.Thread(target=running.loop.set_role, args=(DecodeRole(9), 60.0))
    change.start()
    while not running.beats.get(timeout=60).is_draining:
        continue
    device.wrong.add(CHECKING)
    assert running.until_finished("wrong").error_kind is ErrorKind.GIVEN_BACK
    connector.outputs.append(KVConnectorOutput(finished_sending=("leased", "wrong")))
    running.commands.wake()
    change.join(60)
    until_ended(running)
    assert (
        str(running.loop.failure) == f"{NON_FINITE}; the device check also failed: its logits are not finite"
    )
    assert running.loop.snapshot.role is WorkerRole.DECODE


def until_ended(running: RunningLoop) -> None:
    running.until_ended()
    assert not running.loop.is_alive
    assert running.loop.snapshot.is_draining


def submit_prefill(running: RunningLoop, request_id: str, num_tokens: int) -> None:
    peer = WorkerRef("w1", "incarnation", ("tcp://127.0.0.1:1",), 16)
    transfer = KVTransferParams(TransferRole.PRODUCER, request_id.replace(" ", "-"), 0, peer)
    running.loop.submit("gateway", make_engine_request(request_id, num_tokens, kv_transfer=transfer))
