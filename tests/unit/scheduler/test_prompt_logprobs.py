"""A request that wants its prompt's log-probabilities computes the whole prompt, and gets them with token 0."""

from dataclasses import replace

import pytest

from baton.kv import TransferRole
from baton.request import PackedLogprobs, RequestOutput, TokenLogprobs
from baton.step import ChunkLogprobs
from scheduler import Request, Scheduler
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    flatten,
    make_request,
    make_scheduler,
    received,
    run_step,
)


def prompt_logprobs(first: int, end: int, logprob: float = -1.0) -> ChunkLogprobs:
    return ChunkLogprobs(
        first, PackedLogprobs.of(TokenLogprobs(at, logprob, 1, ()) for at in range(first, end))
    )


def step(
    scheduler: Scheduler, runner: FakeRunner, request: Request, latest: ChunkLogprobs | None
) -> tuple[int, list[RequestOutput]]:
    """One step, whose output has `latest`. How many tokens of the request it computes, and what comes of it."""
    plan = scheduler.schedule()
    output = runner.launch(plan).wait()
    if latest is not None:
        output = replace(output, prompt_logprobs={request.request_id: latest})
    outputs = flatten(scheduler.update_from_output(plan, output))
    return plan.num_scheduled_tokens.get(request.request_id, 0), outputs


def test_they_are_collected_over_chunks_and_come_once_with_token_0() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=16), FakeRunner()
    request = make_request(20, prompt_logprobs=0)
    scheduler.add_request(request)
    assert step(scheduler, runner, request, prompt_logprobs(1, 17)) == (16, [])
    num_tokens, (output,) = step(scheduler, runner, request, prompt_logprobs(17, 20))
    assert (num_tokens, output.first_position, len(output.token_ids)) == (4, 0, 1)
    assert output.prompt_logprobs is not None
    assert [each.token_id for each in output.prompt_logprobs] == [*range(1, 20)]
    _, (output,) = step(scheduler, runner, request, None)
    assert output.prompt_logprobs is None


def test_a_request_beside_it_that_wants_none_gets_none() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request = make_request(20, prompt_logprobs=0)
    scheduler.add_request(request)
    scheduler.add_request(make_request(20))
    _, outputs = step(scheduler, runner, request, prompt_logprobs(1, 20))
    assert [output.prompt_logprobs is None for output in outputs] == [False, True]


def test_a_prompt_of_one_token_has_none_but_says_so() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    scheduler.add_request(request := make_request(1, prompt_logprobs=0))
    _, (output,) = step(scheduler, runner, request, None)
    assert output.prompt_logprobs == PackedLogprobs()


def test_the_prompt_is_computed_whole_although_its_blocks_are_cached() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    for wanted, num_computed in ((None, 33), (0, 33), (None, 1)):
        request = make_request(prompt=range(33), max_tokens=1, prompt_logprobs=wanted)
        scheduler.add_request(request)
        assert step(scheduler, runner, request, None)[0] == num_computed


def test_after_a_preemption_they_are_those_of_the_second_time() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=16), FakeRunner()
    request = make_request(20, prompt_logprobs=0)
    scheduler.add_request(request)
    step(scheduler, runner, request, prompt_logprobs(1, 17))
    scheduler.reset_prefix_cache(force=True)
    assert step(scheduler, runner, request, prompt_logprobs(1, 17, -2.0)) == (16, [])
    _, (output,) = step(scheduler, runner, request, prompt_logprobs(17, 20, -2.0))
    assert output.prompt_logprobs is not None
    assert [each.logprob for each in output.prompt_logprobs] == [-2.0] * 19


def test_prompt_logprobs_with_a_gap_are_a_bug() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=16), FakeRunner()
    scheduler.add_request(request := make_request(20, prompt_logprobs=0))
    step(scheduler, runner, request, None)
    with pytest.raises(AssertionError, match="log-probabilities of some prompt tokens are missing"):
        step(scheduler, runner, request, prompt_logprobs(17, 20))


def test_a_request_that_continues_an_answer_has_reported_them() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    request = make_request(20, output_token_ids=(7,), prompt_logprobs=0)
    scheduler.add_request(request)
    _, (output,) = step(scheduler, runner, request, prompt_logprobs(1, 20))
    assert output.prompt_logprobs is None


def test_a_decode_worker_leaves_them_to_the_prefill_worker() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    scheduler.add_request(request := make_request(20, role=TransferRole.CONSUMER, prompt_logprobs=0))
    run_step(scheduler, runner)
    (output,) = flatten(scheduler.update_connector_output(received(request, 7)))
    assert (output.token_ids, output.prompt_logprobs) == ((7,), None)
