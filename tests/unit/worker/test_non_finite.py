"""Behaviour 55: a worker whose steps are not finite counts them, drains after the second one, and ends."""

import threading

import pytest

from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import ErrorKind, FinishReason
from baton.step import NON_FINITE, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from baton.worker import WorkerRole
from decode_worker import DecodeWorker
from prefill_worker import PrefillWorker
from tests.factories.engine import FakeConnectorWorker, RunningLoop, make_core, make_engine_request
from tests.factories.scheduling import FakeRunner
from worker.loop import MAX_NON_FINITE_STEPS


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
def test_c55_after_the_second_the_worker_gives_its_requests_back_and_ends(async_scheduling: bool) -> None:
    running = RunningLoop(make_core(WrongFor("wrong 1", "wrong 2"), async_scheduling=async_scheduling))
    running.loop.start()
    running.loop.submit("gateway", make_engine_request("bystander", max_tokens=1_900))
    for name in ("wrong 1", "wrong 2"):
        running.loop.submit("gateway", make_engine_request(name))
        assert running.until_finished(name).error == NON_FINITE
    last = running.until_finished("bystander")
    assert (last.error_kind, last.error) == (ErrorKind.GIVEN_BACK, "this worker is draining")
    running.loop.join(60)
    assert not running.loop.is_alive
    assert str(running.loop.failure) == f"{NON_FINITE}, in {MAX_NON_FINITE_STEPS} steps"
    assert running.loop.snapshot.is_draining
    assert running.loop.drain(0.0), "nothing is left to wait for"


def test_c55_it_ends_after_a_change_of_role_that_had_begun() -> None:
    """The second step is computed while the worker leaves its role, and a lease is the last that holds it there."""
    connector = FakeConnectorWorker()
    core = make_core(WrongFor("wrong 1", "wrong 2"), connector, max_num_batched_tokens=16)
    running = RunningLoop(core, PrefillWorker(9), lease_s=60.0)
    running.loop.start()
    submit_prefill(running, "wrong 1", num_tokens=10)
    running.until_finished("wrong 1")
    connector.outputs.append(KVConnectorOutput(finished_sending=("wrong 1",)))
    submit_prefill(running, "wrong 2", num_tokens=1_500)
    change = threading.Thread(target=running.loop.set_role, args=(DecodeWorker(9), 60.0))
    change.start()
    while not running.beats.get(timeout=60).is_draining:
        continue
    assert running.until_finished("wrong 2").error == NON_FINITE
    connector.outputs.append(KVConnectorOutput(finished_sending=("wrong 2",)))
    running.commands.wake()
    change.join(60)
    running.loop.join(10)
    assert str(running.loop.failure) == f"{NON_FINITE}, in {MAX_NON_FINITE_STEPS} steps"
    assert running.loop.snapshot.role is WorkerRole.DECODE


def submit_prefill(running: RunningLoop, request_id: str, num_tokens: int) -> None:
    peer = WorkerRef("w1", "incarnation", ("tcp://127.0.0.1:1",), 16)
    transfer = KVTransferParams(TransferRole.PRODUCER, request_id.replace(" ", "-"), 0, peer)
    running.loop.submit("gateway", make_engine_request(request_id, num_tokens, kv_transfer=transfer))
