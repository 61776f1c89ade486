"""Behaviours 11, 61 and 64: no step is planned past drafts and forced tokens, since they decide what follows.

A driver that plans ahead regardless shows what the scheduler plans then; `EngineCore` waits instead (`awaits_output`).
"""

import pytest

from baton.kv import TransferRole
from baton.kv_groups import KVGroups
from baton.sampling import GrammarKind, StructuredOutput
from baton.step import SchedulerOutput
from scheduler import Request, RequestStatus
from tests.factories.driving import Driver
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    Guess,
    flatten,
    make_request,
    make_scheduler,
    token_at,
)

NUM_DRAFTS = 3
GRAMMAR = StructuredOutput(GrammarKind.REGEX, "whatever the runner says")


def right(num_right: int, *only: Request, first: int = 0) -> Guess:
    """Drafts of which the first so many are right, from an output position on; others than `only` get none."""

    def guess(request_id: str, position: int) -> tuple[int, ...] | None:
        if position < first or (only and request_id not in {request.request_id for request in only}):
            return None
        return tuple(token_at(request_id, position + i) + (i >= num_right) for i in range(NUM_DRAFTS))

    return guess


def drafting(guess: Guess, num_ahead: int = 1, **settings: object) -> Driver:
    return Driver(
        make_scheduler(num_speculative_tokens=NUM_DRAFTS, **settings), FakeRunner(guess=guess), num_ahead
    )


def forcing(num_forced: int, *requests: Request, **settings: object) -> Driver:
    """Two tokens are sampled; then so many are forced behind the third."""

    def force(request_id: str, position: int) -> tuple[int, ...]:
        return tuple(token_at(request_id, 3 + i) for i in range(num_forced)) if position == 3 else ()

    driver = Driver(make_scheduler(**settings), FakeRunner(force=force), num_ahead=1)
    driver.add(*requests)
    if driver.scheduler.wanted_grammars():
        driver.note(flatten(driver.scheduler.grammar_compiled(GRAMMAR)))
    return driver


def tokens_of(request: Request) -> list[int]:
    return [token_at(request.request_id, position) for position in range(request.sampling_params.max_tokens)]


def steps_of(driver: Driver) -> list[SchedulerOutput]:
    """All steps that compute anything."""
    plans = []
    while driver.scheduler.has_requests():
        plans.append(driver.step())
    return [plan for plan in plans if plan.num_scheduled_tokens]


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_c11_steps_of_a_request_with_drafts_are_those_of_planning_step_by_step(num_right: int) -> None:
    histories = []
    for num_ahead in (0, 1, 2):
        driver = drafting(right(num_right), num_ahead)
        driver.add(request := make_request(10, request_id="r"))
        plans = steps_of(driver)
        histories.append([(plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens) for plan in plans])
        assert driver.tokens["r"] == tokens_of(request)
    assert histories[0] == histories[1] == histories[2]
    assert len(histories[0]) == 1 + -(-15 // (1 + num_right))


def test_c61_a_request_is_left_out_while_its_drafts_are_verified_and_others_go_on() -> None:
    drafted, plain = make_request(10), make_request(10)
    driver = drafting(right(1, drafted))
    driver.add(drafted, plain)
    assert driver.step().total_num_scheduled_tokens == 20
    assert driver.step().num_scheduled_tokens == {}, "the runner has not said yet which requests get drafts"
    for _ in range(2):
        plan = driver.step()
        assert plan.num_scheduled_tokens == {drafted.request_id: 1 + NUM_DRAFTS, plain.request_id: 1}
        assert driver.step().num_scheduled_tokens == {plain.request_id: 1}
    driver.run_to_end()
    assert driver.tokens == {each.request_id: tokens_of(each) for each in (drafted, plain)}


def test_c11_an_engine_should_wait_while_a_step_may_bring_several_tokens() -> None:
    driver, request = drafting(right(2)), make_request(10)
    driver.add(request)
    awaits = [driver.scheduler.awaits_output]
    for _ in range(3):
        driver.under_way.append(driver.scheduler.schedule())
        awaits.append(driver.scheduler.awaits_output)
        driver.complete()
        awaits.append(driver.scheduler.awaits_output)
    assert awaits == [False, *[True, False] * 3]
    driver.run_to_end()


def test_c11_without_drafts_and_grammars_an_engine_need_not_wait() -> None:
    driver = Driver(make_scheduler(), num_ahead=1)
    driver.add(make_request(10))
    for _ in range(5):
        driver.step()
        assert driver.under_way
        assert not driver.scheduler.awaits_output
    driver.run_to_end()


def test_c11_a_prompt_for_another_worker_has_no_drafts_so_an_engine_need_not_wait() -> None:
    scheduler = make_scheduler(FakeConnector(), async_scheduling=True, num_speculative_tokens=3)
    scheduler.add_request(make_request(role=TransferRole.PRODUCER))
    assert scheduler.schedule().num_scheduled_tokens
    assert not scheduler.awaits_output


def test_c61_drafts_that_come_while_the_next_step_is_under_way_are_too_late_and_the_one_after_waits() -> None:
    driver, request = drafting(right(NUM_DRAFTS, first=3)), make_request(10)
    driver.add(request)
    while request.num_output_tokens < 3:
        plan = driver.step()
        assert not plan.scheduled_spec_decode_tokens
    assert (plan.num_scheduled_tokens, request.num_output_placeholders) == ({request.request_id: 1}, 1)
    assert request.spec_token_ids == ()
    assert driver.scheduler.awaits_output
    assert driver.step().num_scheduled_tokens == {}
    guessed = tuple(token_at(request.request_id, at) for at in (4, 5, 6))
    assert driver.step().scheduled_spec_decode_tokens == {request.request_id: guessed}
    driver.run_to_end()
    assert driver.tokens[request.request_id] == tokens_of(request)


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_c16_a_block_of_wrong_drafts_that_was_swapped_out_does_not_come_back(num_right: int) -> None:
    """Drafts of a prompt of 29 tokens reach into the third block of 16."""
    old, young = make_request(31, max_tokens=9), make_request(29, max_tokens=12)
    driver = drafting(
        right(num_right, young),
        num_blocks=6,
        preemption="swap",
        num_swap_blocks=6,
        enable_prefix_caching=False,
    )
    driver.add(old, young)
    plans = [driver.step() for _ in range(4)]
    assert plans[3].preempted_req_ids == {young.request_id}, "while its drafts were verified"
    assert len(plans[3].swap_out) == 3
    swapped_in: list[tuple[int, int]] = []
    while driver.scheduler.has_requests():
        swapped_in += driver.step().swap_in
    assert len(swapped_in) >= (2 if num_right < 3 else 3)
    assert driver.tokens == {each.request_id: tokens_of(each) for each in (old, young)}


def test_c16_a_victim_with_a_window_is_not_swapped_out_while_its_drafts_are_verified() -> None:
    """If they are wrong, it needs a row again that has left the window."""
    old, young, groups = make_request(31, max_tokens=9), make_request(30, max_tokens=12), KVGroups(1, 1, 3)
    settings = {"kv_groups": groups, "num_blocks": 9, "preemption": "swap", "num_swap_blocks": 9}
    scheduler = make_scheduler(num_speculative_tokens=NUM_DRAFTS, enable_prefix_caching=False, **settings)
    driver = Driver(scheduler, FakeRunner(guess=right(0, young), memory=PagedMemory(16, groups)), num_ahead=1)
    driver.add(old, young)
    plan = [driver.step() for _ in range(4)][-1]
    assert plan.preempted_req_ids == {young.request_id}
    assert not plan.swap_out
    driver.run_to_end()
    assert driver.tokens == {each.request_id: tokens_of(each) for each in (old, young)}


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_c16_a_request_that_is_swapped_out_while_its_drafts_are_verified_steps_back(num_right: int) -> None:
    old, young = make_request(31, max_tokens=6), make_request(20, max_tokens=12)
    driver = drafting(
        right(num_right, young),
        num_blocks=5,
        preemption="swap",
        num_swap_blocks=4,
        enable_prefix_caching=False,
    )
    driver.add(old, young)
    plans = [driver.step() for _ in range(4)]
    assert plans[2].num_scheduled_tokens == {old.request_id: 1, young.request_id: 1 + NUM_DRAFTS}
    assert plans[3].preempted_req_ids == {young.request_id}, "while its drafts were verified"
    assert young.num_tokens == 20 + 1 + 1 + num_right
    assert young.num_computed_tokens == young.num_tokens - 1
    while young.status is RequestStatus.PREEMPTED:
        plan = driver.step()
    assert plan.num_scheduled_tokens == {young.request_id: 1}
    assert len(plan.swap_in) == 2
    driver.run_to_end()
    assert driver.tokens == {each.request_id: tokens_of(each) for each in (old, young)}


def test_c16_a_request_that_must_compute_all_again_while_its_drafts_are_verified_keeps_its_tokens() -> None:
    driver, request = drafting(right(1)), make_request(10)
    driver.add(request)
    for _ in range(3):
        driver.step()
    assert driver.under_way
    assert driver.scheduler.reset_prefix_cache(force=True)
    driver.complete()
    assert (request.num_output_tokens, request.num_computed_tokens) == (3, 0)
    driver.run_to_end()
    assert driver.tokens[request.request_id] == tokens_of(request)


def test_c64_no_step_is_planned_past_one_whose_tokens_may_be_forced() -> None:
    request = make_request(10, structured_output=GRAMMAR)
    driver = forcing(4, request)
    plans = steps_of(driver)
    name = request.request_id
    forced = tuple(token_at(name, at) for at in (3, 4, 5, 6))
    assert [plan.num_scheduled_tokens[name] for plan in plans] == [10, 1, 1, 5, *[1] * 8]
    assert [plan.forced_token_ids for plan in plans] == [{}, {}, {}, {name: forced}, *[{}] * 8]
    assert driver.tokens[name] == tokens_of(request)


def test_c64_forced_tokens_of_one_request_come_while_another_is_planned_ahead() -> None:
    forced, plain = make_request(10, structured_output=GRAMMAR), make_request(10)
    driver = forcing(4, forced, plain)
    plans = steps_of(driver)
    names = [set(plan.num_scheduled_tokens) for plan in plans]
    assert {plain.request_id} in names, "planned while the other's token was under way"
    assert driver.scheduler.counters()["forced_tokens"] == 4
    assert driver.tokens == {each.request_id: tokens_of(each) for each in (forced, plain)}


def test_c11_a_request_whose_tokens_the_runner_never_forces_is_planned_ahead() -> None:
    """It asks for log-probabilities."""
    request = make_request(10, structured_output=GRAMMAR, logprobs=1)
    driver = forcing(4, request)
    driver.step()
    assert driver.scheduler.awaits_output, "the runner has not said so yet"
    driver.step()
    for _ in range(5):
        driver.step()
        assert driver.under_way
        assert not driver.scheduler.awaits_output
    assert driver.scheduler.counters()["forced_tokens"] == 0
    driver.run_to_end()


def test_c64_a_request_preempted_beside_its_forced_tokens_computes_them_again() -> None:
    request = make_request(10, structured_output=GRAMMAR)
    driver = forcing(4, request, max_num_batched_tokens=6)
    while request.num_output_tokens < 7:
        driver.step()
    driver.complete()
    assert driver.scheduler.reset_prefix_cache(force=True)
    plan = driver.step()
    assert plan.forced_token_ids.keys() == {request.request_id}
    assert plan.num_scheduled_tokens == {request.request_id: 6}
    driver.run_to_end()
    assert driver.tokens[request.request_id] == tokens_of(request)
