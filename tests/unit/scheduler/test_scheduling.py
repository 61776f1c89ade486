"""Behaviours 1 to 10, 12, 14, 15: which request runs when, and how requests end."""

import pytest

from baton.errors import InvalidRequest
from baton.kv import TransferRole
from baton.request import FinishReason
from baton.step import ModelRunnerOutput
from scheduler import RequestStatus, Scheduler
from tests.factories.scheduling import (
    EOS,
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    flatten,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
)


def test_c01_fcfs_admits_in_arrival_order_while_slots_last() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request() for _ in range(3)]
    for request in requests:
        scheduler.add_request(request)
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == [requests[0].request_id, requests[1].request_id]
    assert requests[2].status is RequestStatus.WAITING


def test_c01_fcfs_admission_ends_with_the_first_that_finds_no_blocks() -> None:
    scheduler = make_scheduler(num_blocks=5)
    first, big, small = make_request(32), make_request(40), make_request(1)
    for request in (first, big, small):
        scheduler.add_request(request)
    assert list(scheduler.schedule().num_scheduled_tokens) == [first.request_id]


def test_c02_a_long_prompt_is_split_and_its_rest_comes_before_new_requests() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=100), FakeRunner()
    long, late = make_request(250), make_request(30)
    scheduler.add_request(long)
    scheduler.add_request(late)
    steps = [dict(run_step(scheduler, runner)[0].num_scheduled_tokens) for _ in range(4)]
    assert steps == [
        {long.request_id: 100},
        {long.request_id: 100},
        {long.request_id: 50, late.request_id: 30},
        {long.request_id: 1, late.request_id: 1},
    ]


def test_c03_without_chunked_prefill_a_head_that_does_not_fit_blocks_the_rest() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=100)
    fits, head, small = make_request(60), make_request(50), make_request(10)
    for request in (fits, head, small):
        scheduler.add_request(request)
    assert dict(scheduler.schedule().num_scheduled_tokens) == {fits.request_id: 60}


def test_c04_the_long_prefill_threshold_caps_running_and_waiting_alike() -> None:
    scheduler, runner = make_scheduler(long_prefill_token_threshold=400, num_blocks=300), FakeRunner()
    ids = []
    for _ in range(3):
        request = make_request(800)
        scheduler.add_request(request)
        ids.append(request.request_id)
    steps = [run_step(scheduler, runner)[0].num_scheduled_tokens for _ in range(3)]
    assert [[step[i] for i in ids] for step in steps] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_c05_budget_and_slots_hold_in_every_step() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=3, max_num_batched_tokens=20), FakeRunner()
    for _ in range(8):
        scheduler.add_request(make_request(13, max_tokens=5))
    while scheduler.has_requests():
        plan = scheduler.schedule()
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values()) <= 20
        assert len(plan.num_scheduled_tokens) <= scheduler.request_counts().running <= 3
        scheduler.update_from_output(plan, runner.execute(plan))


def test_c06_fcfs_preempts_the_youngest_and_admits_no_request_in_that_step() -> None:
    scheduler, runner = make_scheduler(num_blocks=5), FakeRunner()
    old, young, waiting = make_request(32), make_request(31), make_request(1)
    for request in (old, young, waiting):
        scheduler.add_request(request)
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)  # old needs a third block, none is left
    assert plan.preempted_req_ids == {young.request_id}
    assert list(plan.num_scheduled_tokens) == [old.request_id]
    assert young.status is RequestStatus.PREEMPTED


def test_c06_priority_preempts_the_worst_wherever_it_stands() -> None:
    scheduler, runner = make_scheduler(num_blocks=4, policy="priority"), FakeRunner()
    better, worst, middle = make_request(15), make_request(5, priority=5), make_request(5, priority=1)
    scheduler.add_request(better)
    scheduler.add_request(worst)
    run_step(scheduler, runner)
    scheduler.add_request(middle)
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)  # better needs a second block, all three are taken
    assert plan.preempted_req_ids == {worst.request_id}
    assert list(plan.num_scheduled_tokens) == [better.request_id, middle.request_id]


def test_c07_a_priority_victim_gives_its_budget_back_and_no_request_is_skipped() -> None:
    scheduler, runner = (
        make_scheduler(num_blocks=5, policy="priority", max_num_batched_tokens=18),
        FakeRunner(),
    )
    worst, second = make_request(5, priority=9), make_request(5, priority=1)
    third, last = make_request(14, priority=2), make_request(5, priority=3)
    for request in (worst, second, third, last):  # one by one, so that the worst stands first
        scheduler.add_request(request)
        run_step(scheduler, runner)
    run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)  # third outgrows its block after worst was scheduled
    assert plan.preempted_req_ids == {worst.request_id}
    ids = (second.request_id, third.request_id, last.request_id)
    assert dict(plan.num_scheduled_tokens) == dict.fromkeys(ids, 1)
    assert plan.scheduled_cached_reqs.request_ids == ids
    assert plan.total_num_scheduled_tokens == 3


def test_c07_a_priority_victims_budget_is_there_for_those_behind_it() -> None:
    settings = {"num_blocks": 10, "policy": "priority", "long_prefill_token_threshold": 8}
    scheduler, runner = make_scheduler(**settings, max_num_batched_tokens=10), FakeRunner()
    worst, grower = make_request(100, priority=9), make_request(10, priority=1)
    behind = make_request(100, priority=2)
    for request, num_steps in ((worst, 1), (grower, 2), (behind, 0)):
        scheduler.add_request(request)
        for _ in range(num_steps):
            run_step(scheduler, runner)
    plan, _ = run_step(scheduler, runner)
    while not plan.preempted_req_ids:
        before = dict(plan.num_scheduled_tokens)
        plan, _ = run_step(scheduler, runner)
    assert before == {worst.request_id: 8, grower.request_id: 1, behind.request_id: 1}
    assert plan.preempted_req_ids == {worst.request_id}
    assert plan.num_scheduled_tokens == {grower.request_id: 1, behind.request_id: 8}
    run_to_end(scheduler, runner)


def test_c07_blocks_that_a_victim_was_to_fill_in_this_step_cannot_be_hit() -> None:
    settings = {"num_blocks": 23, "policy": "priority", "long_prefill_token_threshold": 64}
    scheduler, runner = make_scheduler(**settings), FakeRunner()
    worst, better = make_request(300, priority=9, max_tokens=2), make_request(96, max_tokens=2)
    scheduler.add_request(worst)
    run_step(scheduler, runner)
    scheduler.add_request(better)
    run_step(scheduler, runner)
    run_step(scheduler, runner)  # 192 and 96 tokens are computed
    plan, _ = run_step(scheduler, runner)  # worst takes the last four blocks, then better needs one
    assert plan.preempted_req_ids == {worst.request_id}
    plan, _ = run_step(scheduler, runner)
    assert plan.num_scheduled_tokens == {worst.request_id: 64}
    assert plan.scheduled_cached_reqs.num_computed_tokens == (192,)
    run_to_end(scheduler, runner)


def test_c08_a_preempted_request_starts_over_first_among_the_waiting_and_keeps_its_outputs() -> None:
    scheduler, runner = make_scheduler(num_blocks=5, enable_prefix_caching=False), FakeRunner()
    old, young, waiting = make_request(32, max_tokens=3), make_request(31), make_request(1)
    for request in (old, young, waiting):
        scheduler.add_request(request)
    run_step(scheduler, runner)
    first_output = young.output_token_ids
    run_step(scheduler, runner)
    assert (young.num_computed_tokens, young.output_token_ids) == (0, first_output)
    run_step(scheduler, runner)  # old ends here and gives its blocks back
    plan, _ = run_step(scheduler, runner)
    assert list(plan.num_scheduled_tokens) == [young.request_id, waiting.request_id]
    assert plan.num_scheduled_tokens[young.request_id] == 32
    assert plan.scheduled_cached_reqs.resumed_request_ids == {young.request_id}


def sample_in_one_step(scheduler: Scheduler, request_id: str, tokens: list[int]) -> list[tuple[int, ...]]:
    plan = scheduler.schedule()
    outputs = flatten(scheduler.update_from_output(plan, ModelRunnerOutput({request_id: tokens})))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("settings", "sampled", "kept", "reason", "stop_token_id"),
    [
        ({}, [5, EOS, 6], (5, EOS), FinishReason.STOP, EOS),
        ({"stop_token_ids": (9,)}, [5, 9, EOS], (5, 9), FinishReason.STOP, 9),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, 5, 6], (EOS, EOS, 5), FinishReason.LENGTH, None),
        ({"min_tokens": 2, "max_tokens": 9}, [EOS, EOS, 5], (EOS, EOS), FinishReason.STOP, EOS),
        ({"max_tokens": 1}, [EOS], (EOS,), FinishReason.STOP, EOS),
        ({"max_tokens": 1}, [5], (5,), FinishReason.LENGTH, None),
    ],
)
def test_c10_stop_rules_in_their_order_and_nothing_past_the_stop(
    settings: dict[str, object],
    sampled: list[int],
    kept: tuple[int, ...],
    reason: FinishReason,
    stop_token_id: int | None,
) -> None:
    scheduler = make_scheduler()
    request = make_request(**settings)  # type: ignore[arg-type]
    scheduler.add_request(request)
    plan = scheduler.schedule()
    outputs = flatten(scheduler.update_from_output(plan, ModelRunnerOutput({request.request_id: sampled})))
    assert [(o.token_ids, o.finish_reason, o.stop_token_id) for o in outputs] == [
        (kept, reason, stop_token_id)
    ]
    assert_at_rest(scheduler)


def test_c10_a_full_context_ends_a_request_whatever_it_asked_for() -> None:
    scheduler, runner = make_scheduler(max_model_len=12), FakeRunner()
    request = make_request(10, max_tokens=50, min_tokens=50)
    scheduler.add_request(request)
    tokens = run_to_end(scheduler, runner)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(tokens[request.request_id]) == 2


def test_c12_a_request_waiting_for_remote_kvs_blocks_no_other_and_keeps_its_place() -> None:
    connector = FakeConnector(is_unknown=True)
    scheduler = make_scheduler(connector)
    blocked, local = make_request(role=TransferRole.CONSUMER), make_request()
    scheduler.add_request(blocked)
    scheduler.add_request(local)
    assert list(scheduler.schedule().num_scheduled_tokens) == [local.request_id]
    late = make_request(role=TransferRole.CONSUMER)
    scheduler.add_request(late)
    connector.is_unknown = False
    scheduler.schedule()
    assert list(connector.started) == [blocked.request_id, late.request_id]


def test_c12_loads_under_way_keep_no_slot_from_others() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, max_num_seqs=1)
    load, local = make_request(role=TransferRole.CONSUMER), make_request()
    scheduler.add_request(load)
    scheduler.add_request(local)
    assert list(scheduler.schedule().num_scheduled_tokens) == [local.request_id]
    assert load.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_c14_at_rest_everything_is_empty() -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=30)
    for size in (3, 16, 17, 31, 32, 33, 64):
        scheduler.add_request(make_request(size, max_tokens=20))
    run_to_end(scheduler)
    assert_at_rest(scheduler)


def test_c15_a_running_request_that_cannot_go_on_does_not_stop_those_behind_it() -> None:
    scheduler, runner = make_scheduler(), FakeRunner()
    first, second = make_request(10, max_tokens=1), make_request(10)
    scheduler.add_request(first)
    scheduler.add_request(second)
    plan = (
        scheduler.schedule()
    )  # the token under way will end the first, so there is nothing more to compute for it
    assert list(scheduler.schedule().num_scheduled_tokens) == [second.request_id]
    assert not first.is_finished
    scheduler.update_from_output(plan, runner.execute(plan))
    assert first.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_c15_without_asynchronous_scheduling_a_token_under_way_stops_its_request_only() -> None:
    scheduler, runner = make_scheduler(async_scheduling=False, max_num_batched_tokens=16), FakeRunner()
    first, second = make_request(10), make_request(10)
    scheduler.add_request(first)
    scheduler.add_request(second)
    plan = scheduler.schedule()
    rest = scheduler.schedule()
    assert rest.num_scheduled_tokens == {second.request_id: 4}
    for step in (plan, rest):
        scheduler.update_from_output(step, runner.execute(step))
    run_to_end(scheduler, runner)


def test_c15_running_requests_come_before_waiting_ones() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8), FakeRunner()
    running, waiting = make_request(8), make_request(8)
    scheduler.add_request(running)
    run_step(scheduler, runner)
    scheduler.add_request(waiting)
    assert dict(scheduler.schedule().num_scheduled_tokens) == {running.request_id: 1, waiting.request_id: 7}


def test_ending_requests_is_idempotent_in_every_state() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1), FakeRunner()
    running, waiting = make_request(), make_request()
    scheduler.add_request(running)
    scheduler.add_request(waiting)
    run_step(scheduler, runner)
    ids = [running.request_id, waiting.request_id, "nobody"]
    outputs = flatten(scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR, "because"))
    assert {(o.request_id, o.finish_reason, o.error) for o in outputs} == {
        (request.request_id, FinishReason.ERROR, "because") for request in (running, waiting)
    }
    assert scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED) == {}
    assert scheduler.schedule().finished_req_ids == {running.request_id, waiting.request_id}
    assert_at_rest(scheduler)


def test_a_request_may_fill_the_whole_pool_and_ends_there() -> None:
    scheduler = make_scheduler(num_blocks=3)
    exact, endless = make_request(30, max_tokens=3), make_request(30, max_tokens=50)
    for request in (exact, endless):
        scheduler.add_request(request)
    tokens = run_to_end(scheduler)
    assert len(tokens[exact.request_id]) == len(tokens[endless.request_id]) == 3  # the last one needs no slot
    assert endless.status is RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(
    ("overrides", "num_tokens"),
    [({"max_model_len": 64}, 64), ({"num_blocks": 5}, 64), ({"num_blocks": 3}, 32)],
)
def test_a_prompt_that_can_never_run_is_refused_with_the_numbers(
    overrides: dict[str, int], num_tokens: int
) -> None:
    scheduler = make_scheduler(**overrides)
    with pytest.raises(
        InvalidRequest, match=f"prompt: {num_tokens} tokens and one token to generate do not fit"
    ):
        scheduler.add_request(make_request(num_tokens))
    scheduler.add_request(make_request(num_tokens - 1))
    run_to_end(scheduler)
