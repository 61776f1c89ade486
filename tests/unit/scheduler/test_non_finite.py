"""Behaviour 55: requests whose logits were not finite end with an error, and leave nothing in the prefix cache."""

import pytest

from baton.kv import TransferRole
from baton.request import ErrorKind, FinishReason
from baton.step import NON_FINITE, ModelRunnerOutput, SchedulerOutput
from kv_transfer.commands import AbortSend, FinishSend
from scheduler import Scheduler
from tests.factories.scheduling import (
    FakeRunner,
    assert_at_rest,
    flatten,
    make_config,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
    token_at,
)
from worker.kv_connector_scheduler import KVConnectorScheduler

PROMPT = range(1_000, 1_040)


class WrongFor(FakeRunner):
    """Its logits are not finite for these requests."""

    def __init__(self, *request_ids: str) -> None:
        super().__init__()
        self.request_ids = set(request_ids)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampled = dict(super().execute(plan).sampled_token_ids)
        wrong = {request_id for request_id in self.request_ids if sampled.pop(request_id, None)}
        return ModelRunnerOutput(sampled, non_finite=wrong)


def test_c55_only_the_requests_concerned_end_and_bystanders_tokens_stay() -> None:
    scheduler, runner = make_scheduler(), WrongFor("wrong")
    for name in ("wrong", "right"):
        scheduler.add_request(make_request(40, request_id=name, max_tokens=5))
    _, outputs = run_step(scheduler, runner)
    ended = next(output for output in outputs if output.request_id == "wrong")
    assert (ended.finish_reason, ended.error_kind, ended.error) == (
        FinishReason.ERROR,
        ErrorKind.STEP_FAILED,
        NON_FINITE,
    )
    assert not ended.token_ids
    tokens = [token_id for output in outputs if output.request_id == "right" for token_id in output.token_ids]
    while scheduler.has_requests():
        _, news = run_step(scheduler, runner)
        tokens += [token_id for output in news for token_id in output.token_ids]
    assert tokens == [token_at("right", position) for position in range(5)]
    assert_at_rest(scheduler)


@pytest.mark.parametrize("budget", [1024, 16])
def test_c55_the_prefix_cache_keeps_nothing_of_it(budget: int) -> None:
    """It keeps no blocks of the last step, and none of earlier steps, which sampled nothing and so could not
    be checked."""
    scheduler, runner = make_scheduler(max_num_batched_tokens=budget), WrongFor("wrong")
    scheduler.add_request(make_request(prompt=PROMPT, request_id="wrong"))
    run_to_end(scheduler, runner)
    again = make_request(prompt=PROMPT, max_tokens=1)
    scheduler.add_request(again)
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {again.request_id: min(budget, 40)}
    run_to_end(scheduler, runner)
    scheduler.check_integrity()


def test_c55_what_a_bystander_computes_from_then_on_is_never_hit() -> None:
    """It builds on blocks of earlier steps, which may be wrong."""
    scheduler, runner = make_scheduler(), WrongFor("wrong")
    bystander = make_request(20, max_tokens=20)
    scheduler.add_request(bystander)
    scheduler.add_request(make_request(request_id="wrong"))
    run_to_end(scheduler, runner)
    for prompt, num_computed in ((bystander.all_token_ids[:20], 20), (bystander.all_token_ids, 40 - 16)):
        again = make_request(prompt=prompt, max_tokens=1)
        scheduler.add_request(again)
        plan, _ = run_step(scheduler, runner)
        assert plan.num_scheduled_tokens == {again.request_id: num_computed}


def test_c55_a_step_that_was_planned_meanwhile_brings_it_no_token_and_caches_nothing() -> None:
    scheduler, runner = make_scheduler(async_scheduling=True), WrongFor("wrong")
    scheduler.add_request(make_request(31, request_id="wrong", prompt=PROMPT[:31]))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"wrong": 1}, "it fills the second block"
    outputs = flatten(scheduler.update_from_output(first, runner.execute(first)))
    assert [output.error for output in outputs] == [NON_FINITE]
    late = ModelRunnerOutput({"wrong": [5]})
    assert flatten(scheduler.update_from_output(second, late)) == []
    scheduler.add_request(make_request(prompt=[*PROMPT[:31], 0, 0], request_id="again", max_tokens=1))
    assert scheduler.schedule().num_scheduled_tokens == {"again": 33}
    scheduler.check_integrity()


def test_c55_a_request_that_lost_its_blocks_meanwhile_ends_in_the_queue() -> None:
    scheduler, runner = make_scheduler(async_scheduling=True), WrongFor("wrong")
    scheduler.add_request(make_request(request_id="wrong"))
    plan = scheduler.schedule()
    assert scheduler.reset_prefix_cache(force=True)
    outputs = flatten(scheduler.update_from_output(plan, runner.execute(plan)))
    assert [output.error for output in outputs] == [NON_FINITE]
    assert_at_rest(scheduler)


def test_c55_a_prefill_that_is_not_finite_hands_nothing_over() -> None:
    connector = KVConnectorScheduler(16)
    scheduler, runner = Scheduler(make_config(), connector, hash_key=b"k" * 16), WrongFor("wrong")
    scheduler.add_request(make_request(40, request_id="wrong", role=TransferRole.PRODUCER))
    run_step(scheduler, runner)
    commands = scheduler.schedule().kv_connector_metadata.at_once
    assert [command for command in commands if isinstance(command, AbortSend | FinishSend)] == [
        AbortSend("wrong", "the prefill failed", is_unneeded=False, is_held=True)
    ]
