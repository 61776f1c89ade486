"""Behaviours 36 and 52 as the scheduler sees them: requests that come with output which others sampled."""

import pytest

from baton.errors import InvalidRequest
from baton.kv import TransferRole
from baton.request import FinishReason
from baton.step import FailedKV, KVConnectorOutput
from scheduler import RequestStatus
from tests.factories.scheduling import (
    EOS,
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    failed,
    flatten,
    make_request,
    make_scheduler,
    received,
    run_step,
    run_to_end,
    token_at,
)

CONSUMER, PRODUCER = TransferRole.CONSUMER, TransferRole.PRODUCER


def said(request_id: str, num_tokens: int, first: int = 0) -> list[int]:
    """What the fake model says at these positions."""
    return [token_at(request_id, position) for position in range(first, num_tokens)]


def test_c52_alone_it_computes_prompt_and_outputs_and_goes_on_behind_them() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=32), FakeRunner()
    request = make_request(40, request_id="r", max_tokens=9, output_token_ids=said("r", 5))
    scheduler.add_request(request)
    plans, outputs = zip(*(run_step(scheduler, runner) for _ in range(3)), strict=True)
    assert [plan.num_scheduled_tokens["r"] for plan in plans] == [32, 13, 1]
    assert plans[0].scheduled_new_reqs[0].output_token_ids == tuple(said("r", 5))
    assert outputs[0] == [], "some of what it came with is not computed yet"
    assert [(o.first_position, o.token_ids) for o in outputs[1]] == [(5, (token_at("r", 5),))]
    assert run_to_end(scheduler, runner) == {"r": said("r", 9, first=7)}


@pytest.mark.parametrize("num_outputs", [1, 7, 8, 9, 24])
def test_c52_a_producer_hands_over_its_outputs_too_and_samples_one_token_behind_them(
    num_outputs: int,
) -> None:
    connector = FakeConnector(holds=True)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(
        40, request_id="r", max_tokens=50, role=PRODUCER, output_token_ids=said("r", num_outputs)
    )
    scheduler.add_request(request)
    plan, (output,) = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {"r": 40 + num_outputs}
    assert output.finish_reason is FinishReason.HANDED_OVER
    assert (output.first_position, output.token_ids) == (num_outputs, (token_at("r", num_outputs),))
    assert request.first_token is not None
    assert request.first_token.token_id == token_at("r", num_outputs)
    assert len(connector.leased["r"][1]) == -(-(40 + num_outputs) // 16)
    scheduler.update_connector_output(KVConnectorOutput(finished_sending=("r",)))  # which looks at all slots
    assert_at_rest(scheduler)


@pytest.mark.parametrize("num_outputs", [1, 7, 8, 9, 24])
def test_c52_a_consumer_loads_its_outputs_too_and_computes_nothing_of_them(num_outputs: int) -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(
        40,
        request_id="r",
        max_tokens=num_outputs + 4,
        role=CONSUMER,
        output_token_ids=said("r", num_outputs),
    )
    scheduler.add_request(request)
    run_step(scheduler, runner)
    block_ids, num_tokens = connector.started["r"]
    assert (len(block_ids), num_tokens) == (-(-(40 + num_outputs) // 16), 40 + num_outputs)
    news = scheduler.update_connector_output(received(request, token_at("r", num_outputs)))
    (first,) = flatten(news)
    assert (first.first_position, first.token_ids) == (num_outputs, (token_at("r", num_outputs),))
    plan, (second,) = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {"r": 1}, "nothing is computed again"
    assert plan.scheduled_new_reqs[0].is_loaded
    assert plan.scheduled_new_reqs[0].output_token_ids == tuple(said("r", num_outputs + 1))
    assert (second.first_position, second.token_ids) == (num_outputs + 1, (token_at("r", num_outputs + 1),))
    assert run_to_end(scheduler, runner) == {"r": said("r", num_outputs + 4, first=num_outputs + 2)}


def test_c35_a_load_that_fails_computes_the_outputs_here_too() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(40, request_id="r", max_tokens=30, role=CONSUMER, output_token_ids=said("r", 20))
    scheduler.add_request(request)
    run_step(scheduler, runner)
    scheduler.update_connector_output(failed(request, num_valid_blocks=3))
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {"r": 12}, "48 of 60 tokens had arrived"
    assert run_to_end(scheduler, runner)["r"] == said("r", 30, first=21)


def test_c36_a_load_that_was_put_off_comes_back_with_all_its_tokens() -> None:
    connector = FakeConnector()
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(40, request_id="r", max_tokens=30, role=CONSUMER, output_token_ids=said("r", 20))
    scheduler.add_request(request)
    run_step(scheduler, runner)
    postponed = FailedKV("r", 0, "later", is_postponed=True)
    assert scheduler.update_connector_output(KVConnectorOutput(failed_recving=(postponed,))) == {}
    del connector.started["r"]
    run_step(scheduler, runner)
    assert connector.started["r"][1] == 60
    scheduler.update_connector_output(received(request, token_at("r", 20)))
    assert run_to_end(scheduler, runner)["r"] == said("r", 30, first=21)


def test_c52_the_prefix_cache_is_hit_by_prompt_and_outputs_but_only_the_prompt_counts_as_cached() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    prompt = range(1_000, 1_040)
    first = make_request(prompt=prompt, request_id="r", max_tokens=60)
    scheduler.add_request(first)
    run_to_end(scheduler, runner)
    again = make_request(prompt=prompt, request_id="r", max_tokens=60, output_token_ids=said("r", 50))
    scheduler.add_request(again)
    plan, outputs = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {"r": 90 - 80}, "five blocks of prompt and outputs were there"
    assert again.num_cached_tokens == 40
    assert [output.num_cached_tokens for output in outputs] == [40]
    assert run_to_end(scheduler, runner)["r"] == said("r", 60, first=51)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_c52_what_ends_a_request_counts_from_its_first_output(async_scheduling: bool) -> None:
    def next_token(request_id: str, position: int) -> int:
        return EOS if position in (6, 9) else token_at(request_id, position)

    outputs = said("r", 5)
    for options, expected in (
        ({"max_tokens": 7, "ignore_eos": True}, (FinishReason.LENGTH, 2)),
        ({"max_tokens": 20}, (FinishReason.STOP, 2)),
        ({"max_tokens": 20, "min_tokens": 8}, (FinishReason.STOP, 5)),
        (
            {"max_tokens": 20, "stop_token_ids": (token_at("r", 7),), "ignore_eos": True},
            (FinishReason.STOP, 3),
        ),
        ({"max_tokens": 30, "ignore_eos": True}, (FinishReason.LENGTH, 20)),  # max_model_len
    ):
        scheduler = make_scheduler(max_model_len=40, async_scheduling=async_scheduling)
        runner = FakeRunner(next_token)
        scheduler.add_request(make_request(15, request_id="r", output_token_ids=outputs, **options))
        produced = []
        while scheduler.has_requests():
            produced += run_step(scheduler, runner)[1]
        num_tokens = sum(len(output.token_ids) for output in produced)
        assert (produced[-1].finish_reason, num_tokens) == expected, options


def test_c40_a_producer_whose_one_token_ends_the_request_answers_it_alone() -> None:
    connector = FakeConnector(holds=False)
    scheduler, runner = make_scheduler(connector), FakeRunner(memory=connector.memory)
    request = make_request(20, request_id="r", max_tokens=6, role=PRODUCER, output_token_ids=said("r", 5))
    scheduler.add_request(request)
    _, (output,) = run_step(scheduler, runner)
    assert (output.finish_reason, output.first_position) == (FinishReason.LENGTH, 5)
    assert_at_rest(scheduler)


def test_c41_a_producer_that_is_preempted_computes_its_outputs_again_before_it_hands_over() -> None:
    connector = FakeConnector(holds=True)
    scheduler = make_scheduler(
        connector, num_blocks=8, max_num_batched_tokens=48, enable_prefix_caching=False
    )
    runner = FakeRunner(memory=connector.memory)
    old = make_request(31, request_id="old", max_tokens=40)
    scheduler.add_request(old)
    run_step(scheduler, runner)
    young = make_request(
        40, request_id="young", max_tokens=99, role=PRODUCER, output_token_ids=said("young", 40)
    )
    scheduler.add_request(young)
    while young.status is not RequestStatus.PREEMPTED:
        _, outputs = run_step(scheduler, runner)
    scheduler.finish_requests(["old"], RequestStatus.FINISHED_ABORTED)
    while not young.is_finished:
        _, outputs = run_step(scheduler, runner)
    assert [(o.first_position, o.token_ids) for o in outputs] == [(40, (token_at("young", 40),))]
    scheduler.update_connector_output(KVConnectorOutput(finished_sending=("young",)))
    assert_at_rest(scheduler)


@pytest.mark.parametrize(
    ("outputs", "options", "complaint"),
    [
        (said("r", 5), {"max_tokens": 5}, "output_token_ids: 5 output tokens, but max_tokens allows 5"),
        (said("r", 5), {"max_tokens": 4}, "output_token_ids: 5 output tokens, but max_tokens allows 4"),
        ([7, EOS, 8], {}, "output_token_ids: token 1 is 2, which ends the request"),
        ([7, 9], {"stop_token_ids": (9,)}, "output_token_ids: token 1 is 9, which ends the request"),
        (
            [7] * 15,
            {"max_tokens": 90},
            "prompt: 25 tokens, 15 of output and one token to generate do not fit",
        ),
    ],
)
def test_outputs_that_cannot_go_on_are_refused(
    outputs: list[int], options: dict[str, object], complaint: str
) -> None:
    scheduler = make_scheduler(max_model_len=40)
    with pytest.raises(InvalidRequest) as refusal:
        scheduler.add_request(make_request(25, output_token_ids=outputs, **options))  # type: ignore[arg-type]
    assert str(refusal.value).startswith(complaint)
    assert_at_rest(scheduler)


def test_outputs_that_would_have_ended_it_but_for_min_tokens_or_ignore_eos_go_on() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    for options in ({"min_tokens": 9}, {"ignore_eos": True}):
        request = make_request(output_token_ids=[7, EOS, 8], max_tokens=9, **options)
        scheduler.add_request(request)
        assert len(run_to_end(scheduler, runner)[request.request_id]) == 6
