"""Behaviours 16 and 61: drafts get slots and are verified with their step; of a wrong draft, nothing is left.

That vLLM's scheduler decides the same is shown by test_v1_decisions.py, that no mode changes a token by
tests/property/test_random_workloads.py.
"""

from collections.abc import Callable

import pytest

from baton.kv import BlocksStored
from baton.kv_groups import KVGroups
from baton.request import FinishReason
from baton.step import ModelRunnerOutput, SchedulerOutput
from scheduler import Request, RequestStatus, Scheduler
from tests.factories.driving import Driver
from tests.factories.guesses import guesses
from tests.factories.scheduling import (
    EOS,
    FakeRunner,
    Guess,
    flatten,
    make_request,
    make_scheduler,
    run_step,
    token_at,
)

NUM_DRAFTS = 3


def right(num_right: int, num_drafts: int = NUM_DRAFTS) -> Callable[[str, int], tuple[int, ...]]:
    """Drafts of which the first so many are right."""

    def guess(request_id: str, position: int) -> tuple[int, ...]:
        return tuple(token_at(request_id, position + i) + (i >= num_right) for i in range(num_drafts))

    return guess


def drafting(**settings: object) -> Scheduler:
    return make_scheduler(num_speculative_tokens=NUM_DRAFTS, **settings)


def driver_for(guess: Guess, **settings: object) -> Driver:
    return Driver(drafting(**settings), FakeRunner(guess=guess))


def drafts_of(plan: SchedulerOutput, request: Request) -> tuple[int, ...]:
    return plan.scheduled_spec_decode_tokens.get(request.request_id, ())


def start(driver: Driver, request: Request) -> None:
    """Computes the prompt of a request. Afterwards, the request has one output token, and drafts."""
    driver.add(request)
    driver.step()
    assert request.num_output_tokens == 1


def test_c61_drafts_are_the_last_tokens_of_their_step() -> None:
    driver, request = driver_for(right(NUM_DRAFTS)), make_request(10)
    start(driver, request)
    assert request.spec_token_ids == tuple(token_at(request.request_id, at) for at in (1, 2, 3))
    plan = driver.step()
    assert plan.num_scheduled_tokens == {request.request_id: 1 + NUM_DRAFTS}
    assert plan.scheduled_cached_reqs.num_computed_tokens == (10,)
    assert drafts_of(plan, request) == tuple(token_at(request.request_id, at) for at in (1, 2, 3))


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_c16_after_a_rejection_the_computed_tokens_step_back(num_right: int) -> None:
    driver, request = driver_for(right(num_right)), make_request(10, max_tokens=16)
    start(driver, request)
    driver.step()
    assert request.num_output_tokens == 1 + num_right + 1
    assert request.num_computed_tokens == request.num_tokens - 1
    plan = driver.step()
    assert plan.scheduled_cached_reqs.num_computed_tokens == (10 + 1 + num_right,)
    tokens = driver.run_to_end()[request.request_id]
    assert tokens == [token_at(request.request_id, position) for position in range(16)]


def test_c61_acceptance_is_counted_by_place() -> None:
    driver, request = driver_for(right(2)), make_request(10, max_tokens=7)
    driver.add(request)
    driver.run_to_end()
    assert {name: n for name, n in driver.scheduler.counters().items() if name.startswith("spec_decode")} == {
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 2 * NUM_DRAFTS,
        "spec_decode_num_accepted_tokens": 4,
        "spec_decode_num_accepted_tokens_per_pos_0": 2,
        "spec_decode_num_accepted_tokens_per_pos_1": 2,
    }


def test_c61_no_more_drafts_than_configured_are_kept() -> None:
    driver, request = driver_for(right(9, num_drafts=9)), make_request(10, max_tokens=50)
    start(driver, request)
    assert len(drafts_of(driver.step(), request)) == NUM_DRAFTS


def test_c61_without_speculation_the_drafts_of_a_runner_are_ignored() -> None:
    driver, request = Driver(make_scheduler(), FakeRunner(guess=right(3))), make_request(10)
    start(driver, request)
    plan = driver.step()
    assert plan.num_scheduled_tokens == {request.request_id: 1}
    assert not plan.scheduled_spec_decode_tokens


@pytest.mark.parametrize(
    ("settings", "num_kept"),
    [
        ({"max_num_batched_tokens": 3}, 2),
        ({"max_num_batched_tokens": 1}, 0),
        ({"long_prefill_token_threshold": 2}, 1),
        ({"max_model_len": 13}, 1),  # 11 known tokens; the 13th is never computed
    ],
    ids=str,
)
def test_c61_drafts_are_trimmed_to_what_is_scheduled(settings: dict[str, int], num_kept: int) -> None:
    driver, request = driver_for(right(NUM_DRAFTS), **settings), make_request(10)
    driver.add(request)
    while not request.num_output_tokens:
        driver.step()
    plan = driver.step()
    assert plan.num_scheduled_tokens == {request.request_id: 1 + num_kept}
    assert len(drafts_of(plan, request)) == num_kept
    assert request.num_output_tokens == 1 + num_kept + 1
    driver.run_to_end()


def test_c61_drafts_wait_for_a_step_that_has_budget_for_their_request() -> None:
    driver = driver_for(right(NUM_DRAFTS), max_num_batched_tokens=4)
    first, second = make_request(2), make_request(2)
    driver.add(first, second)
    driver.step()
    plan = driver.step()
    assert plan.num_scheduled_tokens == {first.request_id: 4}
    assert len(second.spec_token_ids) == NUM_DRAFTS


def test_c61_drafts_go_no_further_than_the_pool() -> None:
    """A request may fill the whole pool with its last token but one: its drafts must not ask for more."""
    driver = driver_for(right(0), num_blocks=3, max_model_len=2048)
    request = make_request(20, max_tokens=50)
    driver.add(request)
    tokens = driver.run_to_end()[request.request_id]
    assert len(tokens) == 13, "32 slots, and one token that is never computed"
    assert driver.scheduler.counters().get("preemptions", 0) == 0


def test_c61_accepted_tokens_after_a_stop_are_dropped() -> None:
    def next_token(request_id: str, position: int) -> int:
        return EOS if position == 2 else token_at(request_id, position)

    def all_right(request_id: str, position: int) -> tuple[int, ...]:
        return tuple(next_token(request_id, position + ahead) for ahead in range(NUM_DRAFTS))

    driver, request = Driver(drafting(), FakeRunner(next_token, guess=all_right)), make_request(10)
    driver.add(request)
    tokens = driver.run_to_end()[request.request_id]
    assert tokens == [next_token(request.request_id, position) for position in range(3)]
    assert driver.ends == {request.request_id: FinishReason.STOP}


def test_c61_accepted_tokens_after_max_tokens_are_dropped() -> None:
    driver, request = driver_for(right(NUM_DRAFTS)), make_request(10, max_tokens=3)
    driver.add(request)
    assert len(driver.run_to_end()[request.request_id]) == 3
    assert driver.ends == {request.request_id: FinishReason.LENGTH}


def test_c61_drafts_have_slots_and_keep_them_after_a_rejection() -> None:
    driver, request = driver_for(right(0)), make_request(15)
    start(driver, request)
    (new_blocks,) = driver.step().scheduled_cached_reqs.new_block_ids
    assert len(new_blocks) == 1, (
        "15 known tokens and the one after them fill a block; the drafts need another"
    )
    assert request.num_tokens == 17
    (new_blocks,) = driver.step().scheduled_cached_reqs.new_block_ids
    assert new_blocks == ()


def cached_prefix(driver: Driver, prompt: list[int]) -> int:
    """How many tokens of a prompt a new request finds."""
    request = make_request(prompt=prompt, max_tokens=1)
    driver.add(request)
    driver.run_to_end()
    return request.num_cached_tokens


def test_c61_rejected_drafts_never_enter_the_prefix_cache() -> None:
    """The request ends with the step that rejects its drafts, one of which fills a block's last slot."""
    driver, request = driver_for(right(0)), make_request(30, max_tokens=2)
    driver.add(request)
    driver.run_to_end()
    assert request.num_tokens == 32
    wrong = right(0)(request.request_id, 1)
    prompt = list(request.prompt_token_ids)
    assert cached_prefix(driver, [*request.all_token_ids, 7]) == 16, "the last token was never computed"
    assert cached_prefix(driver, [*prompt, token_at(request.request_id, 0), *wrong]) == 16


def test_c61_accepted_drafts_enter_the_prefix_cache() -> None:
    """The request ends with the step that accepts the draft in a block's last slot."""
    driver, request = driver_for(right(NUM_DRAFTS)), make_request(28, max_tokens=5)
    driver.add(request)
    driver.run_to_end()
    assert request.num_tokens == 33
    assert cached_prefix(driver, [*request.all_token_ids, 7]) == 32


def test_c61_a_block_of_drafts_cannot_be_hit_before_they_are_accepted() -> None:
    driver, request = driver_for(right(NUM_DRAFTS), num_blocks=40), make_request(29)
    start(driver, request)
    driver.scheduler.kv_events.full_listing()
    plan = driver.scheduler.schedule()
    assert len(drafts_of(plan, request)) == NUM_DRAFTS, "with them, 33 tokens"
    assert driver.scheduler.kv_events.take_events() == []
    driver.under_way.append(plan)
    driver.complete()
    driver.step()
    (stored,) = driver.scheduler.kv_events.take_events()
    assert stored == BlocksStored((request.block_hashes[1],))


def pool_for_two(guess: Guess, **settings: object) -> tuple[Driver, Request, Request]:
    """Two requests with a block each, in a pool of three; the drafts of the first take the third block."""
    driver = driver_for(guess, num_blocks=4, enable_prefix_caching=False, **settings)
    first, second = make_request(12, arrival_time=0.0), make_request(12, arrival_time=1.0)
    driver.add(first, second)
    driver.step()
    return driver, first, second


def test_c61_a_preempted_request_loses_its_drafts() -> None:
    driver, first, second = pool_for_two(right(0))
    driver.step()  # 13 known tokens and 3 drafts fill the block
    plan = driver.step()
    assert drafts_of(plan, first), "its drafts took the last block"
    assert plan.preempted_req_ids == {second.request_id}
    assert second.status is RequestStatus.PREEMPTED
    assert second.spec_token_ids == ()
    for request_id, tokens in driver.run_to_end().items():
        assert tokens == [token_at(request_id, position) for position in range(16)]


def test_c07_drafts_of_a_victim_are_withdrawn_from_the_step() -> None:
    driver = driver_for(right(0), num_blocks=4, enable_prefix_caching=False, policy="priority")
    worse, better = make_request(12, priority=5), make_request(12, priority=0)
    start(driver, worse)
    start(driver, better)
    assert len(driver.step().scheduled_spec_decode_tokens) == 2  # the drafts of `worse` take the last block
    plan = driver.step()
    assert plan.preempted_req_ids == {worse.request_id}
    assert plan.num_scheduled_tokens == {better.request_id: 1 + NUM_DRAFTS}
    assert plan.scheduled_spec_decode_tokens.keys() == {better.request_id}
    for request_id, tokens in driver.run_to_end().items():
        assert tokens == [token_at(request_id, position) for position in range(16)]


@pytest.mark.parametrize(
    "preemption", [{"preemption": "recompute"}, {"preemption": "swap", "num_swap_blocks": 8}]
)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_c16_preempted_requests_go_on_with_drafts(preemption: dict[str, object], policy: str) -> None:
    driver = driver_for(guesses(NUM_DRAFTS), num_blocks=10, policy=policy, **preemption)
    requests = [make_request(20, request_id=f"r{n}", max_tokens=60, priority=-n) for n in range(4)]
    driver.add(*requests)
    for request_id, tokens in driver.run_to_end().items():
        assert tokens == [token_at(request_id, position) for position in range(60)]
    counters = driver.scheduler.counters()
    assert counters["preemptions"] >= 3
    assert counters["spec_decode_num_accepted_tokens"] > 40


def test_c16_with_windows_a_victim_whose_draft_is_under_way_is_not_swapped_out() -> None:
    """If the draft is wrong, the victim may need rows again that have left the window."""
    settings = {"kv_groups": KVGroups(1, 1, 32), "preemption": "swap", "num_swap_blocks": 8, "num_blocks": 12}
    scheduler = drafting(**settings, long_prefill_token_threshold=16)
    driver = Driver(scheduler, FakeRunner(guess=right(1, num_drafts=1)), num_ahead=1)
    old, victim = make_request(70, max_tokens=1), make_request(30, max_tokens=30)
    driver.add(old, victim)
    while not (plan := driver.step()).preempted_req_ids:
        last = plan
    assert len(drafts_of(last, victim)) == 1
    assert plan.preempted_req_ids == {victim.request_id}
    assert plan.swap_out == ()
    assert driver.run_to_end()[victim.request_id] == [token_at(victim.request_id, at) for at in range(30)]


def test_c16_a_forced_reset_while_drafts_are_verified_loses_nothing() -> None:
    driver, request = driver_for(right(1)), make_request(20, max_tokens=8)
    start(driver, request)
    plan = driver.scheduler.schedule()
    assert drafts_of(plan, request)
    driver.scheduler.reset_prefix_cache(force=True)
    driver.under_way.append(plan)
    driver.complete()
    assert (request.num_computed_tokens, request.spec_token_ids) == (0, ())
    tokens = driver.run_to_end()[request.request_id]
    assert tokens == [token_at(request.request_id, position) for position in range(8)]


def test_c16_a_request_that_ends_while_its_drafts_are_verified_leaves_nothing() -> None:
    driver, request = driver_for(right(1)), make_request(20)
    start(driver, request)
    plan = driver.scheduler.schedule()
    driver.note(
        flatten(driver.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED))
    )
    driver.under_way.append(plan)
    driver.complete()
    driver.run_to_end()
    assert driver.ends == {request.request_id: FinishReason.ABORT}


def test_c16_a_failed_step_with_drafts_is_tried_again_without_them() -> None:
    """A request has passed when its known tokens are computed: it need not get as far as its drafts went."""
    scheduler, runner = drafting(), FakeRunner(guess=right(NUM_DRAFTS))
    requests = [make_request(10, max_tokens=8) for _ in range(2)]
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler, runner)
    failed = scheduler.schedule()
    assert len(failed.scheduled_spec_decode_tokens) == 2
    scheduler.retry_in_halves(failed, [], "on fire")
    assert scheduler.is_trying
    for request in requests:
        plan, _ = run_step(scheduler, runner)
        assert plan.num_scheduled_tokens == {request.request_id: 11}
    assert not scheduler.is_trying


def test_c16_a_request_that_fails_while_its_drafts_are_verified_ends_alone() -> None:
    scheduler, runner = drafting(), FakeRunner(guess=right(NUM_DRAFTS))
    wrong, fine = make_request(10), make_request(10)
    for request in (wrong, fine):
        scheduler.add_request(request)
    run_step(scheduler, runner)
    plan = scheduler.schedule()
    output = runner.execute(plan)
    sampled = {fine.request_id: output.sampled_token_ids[fine.request_id]}
    scheduler.update_from_output(
        plan,
        ModelRunnerOutput(
            sampled, failed={wrong.request_id: "no match"}, draft_token_ids=output.draft_token_ids
        ),
    )
    assert wrong.is_failed
    assert fine.num_output_tokens == 2 + NUM_DRAFTS
    scheduler.check_integrity()


def test_c64_forced_tokens_count_at_once_and_the_next_plan_names_them() -> None:
    scheduler, request = make_scheduler(), make_request(10, max_tokens=6)
    scheduler.add_request(request)
    plan = scheduler.schedule()
    sampled = {request.request_id: [7]}
    output = ModelRunnerOutput(sampled, forced_token_ids={request.request_id: (8, 9)})
    (said,) = flatten(scheduler.update_from_output(plan, output))
    assert said.token_ids == (7, 8, 9)
    plan = scheduler.schedule()
    assert plan.forced_token_ids == {request.request_id: (8, 9)}
    assert plan.num_scheduled_tokens == {request.request_id: 3}
    output = ModelRunnerOutput(sampled, forced_token_ids={request.request_id: (8, 9, 1)})
    (said,) = flatten(scheduler.update_from_output(plan, output))
    assert said.token_ids == (7, 8, 9), "max_tokens"
    assert said.finish_reason is FinishReason.LENGTH
    assert scheduler.counters()["forced_tokens"] == 4
    assert scheduler.schedule().forced_token_ids == {}, "it has ended"


def test_c64_forced_tokens_after_a_draft_that_ends_the_request_do_not_count() -> None:
    scheduler, request = drafting(), make_request(10, max_tokens=2)
    scheduler.add_request(request)
    runner = FakeRunner(guess=right(NUM_DRAFTS))
    run_step(scheduler, runner)
    plan = scheduler.schedule()
    assert drafts_of(plan, request)
    output = ModelRunnerOutput({request.request_id: [7, 8]}, forced_token_ids={request.request_id: (9,)})
    (said,) = flatten(scheduler.update_from_output(plan, output))
    assert said.token_ids == (7,)
    assert scheduler.counters()["forced_tokens"] == 0
