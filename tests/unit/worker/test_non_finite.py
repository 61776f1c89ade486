"""Behaviour 55: a worker whose steps are not finite counts them, drains after the second one, and ends."""

import pytest

from baton.request import ErrorKind, FinishReason
from baton.step import NON_FINITE, ModelRunnerOutput, SchedulerOutput
from baton.worker import WorkerRole
from decode_worker import DecodeWorker
from prefill_worker import PrefillWorker
from tests.factories.engine import FakeRunner, RunningLoop, make_core, make_engine_request
from worker.loop import MAX_NON_FINITE_STEPS


class WrongFor(FakeRunner):
    """Its logits are not finite for requests whose name begins like this, from their second token on."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._num_tokens: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampled, wrong = {}, set()
        for request_id, token_ids in super().execute(plan).sampled_token_ids.items():
            self._num_tokens[request_id] = self._num_tokens.get(request_id, 0) + 1
            if request_id.startswith(self._prefix) and self._num_tokens[request_id] > 1:
                wrong.add(request_id)
            else:
                sampled[request_id] = token_ids
        return ModelRunnerOutput(sampled, non_finite=wrong)


def test_c55_after_one_such_step_the_worker_serves_on_and_says_so() -> None:
    core = make_core(WrongFor("wrong"))
    assert core.counters()["non_finite_steps"] == 0
    with RunningLoop(core) as running:
        running.loop.submit("gateway", make_engine_request("wrong"))
        last = running.until_finished("wrong")
        assert (last.finish_reason, last.error_kind, last.error) == (
            FinishReason.ERROR,
            ErrorKind.INTERNAL,
            NON_FINITE,
        )
        running.loop.submit("gateway", make_engine_request("right"))
        assert running.until_finished("right").finish_reason is FinishReason.LENGTH
        assert running.loop.snapshot.counters["non_finite_steps"] == 1
        assert not running.loop.snapshot.is_draining


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_c55_after_the_second_the_worker_gives_its_requests_back_and_ends(async_scheduling: bool) -> None:
    running = RunningLoop(make_core(WrongFor("wrong"), async_scheduling=async_scheduling))
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


def test_c55_a_change_of_role_does_not_keep_it() -> None:
    """The second step is computed while the worker leaves its role; it ends as soon as it has left."""
    running = RunningLoop(make_core(WrongFor("wrong")), DecodeWorker(9))
    running.loop.start()
    running.loop.submit("gateway", make_engine_request("wrong 1"))
    running.until_finished("wrong 1")
    running.loop.submit("gateway", make_engine_request("long", max_tokens=1_900))
    running.next_output()
    running.loop.submit("gateway", make_engine_request("wrong 2"))
    running.loop.set_role(PrefillWorker(9), 0.0)
    running.loop.join(60)
    assert str(running.loop.failure) == f"{NON_FINITE}, in {MAX_NON_FINITE_STEPS} steps"
    assert running.loop.snapshot.role is WorkerRole.PREFILL
