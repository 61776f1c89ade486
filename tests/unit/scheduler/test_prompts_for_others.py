"""The order of prompts that a prefill worker computes: by remaining work, and none starves."""

from typing import Any

import pytest

from baton.kv import TransferRole
from baton.request import FinishReason
from scheduler import Request, Scheduler
from scheduler.step import StepPlan
from tests.factories.driving import Driver
from tests.factories.scheduling import FakeConnector, make_config, make_request, make_scheduler


def make_prefill_worker(num_ahead: int = 0, **settings: Any) -> Driver:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, **{"max_num_batched_tokens": 64, **settings})
    return Driver(scheduler, num_ahead=num_ahead, connector=connector)


def prompt(name: str, num_tokens: int, **options: Any) -> Request:
    return make_request(num_tokens, request_id=name, role=TransferRole.PRODUCER, **options)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_short_prompt_overtakes_a_long_one_and_does_not_wait_for_a_part_of_it(num_ahead: int) -> None:
    driver = make_prefill_worker(num_ahead)
    driver.add(prompt("long", 300))
    assert driver.step().num_scheduled_tokens == {"long": 64}
    driver.add(prompt("short", 20))
    assert driver.step().num_scheduled_tokens == {"short": 20}
    driver.add(prompt("also short", 20))
    assert driver.step().num_scheduled_tokens == {"also short": 20}
    assert driver.step().num_scheduled_tokens == {"long": 64}
    assert driver.ends == {"short": FinishReason.HANDED_OVER, "also short": FinishReason.HANDED_OVER}


def test_a_prompt_goes_between_two_that_have_begun() -> None:
    driver = make_prefill_worker(max_num_batched_tokens=128, long_prefill_token_threshold=40)
    driver.add(prompt("short", 200), prompt("long", 400))
    driver.step()
    driver.add(prompt("between", 250))
    driver.step()
    assert list(driver.step().num_scheduled_tokens) == ["short", "between", "long"]


def test_a_prompt_that_has_overtaken_another_stays_before_it() -> None:
    driver = make_prefill_worker()
    driver.add(prompt("long", 300))
    driver.step()
    driver.add(prompt("shorter", 100))
    assert driver.step().num_scheduled_tokens == {"shorter": 64}
    assert driver.step().num_scheduled_tokens == {"shorter": 36}


def test_where_a_step_takes_as_long_with_few_tokens_a_part_of_a_long_prompt_fills_it() -> None:
    connector = FakeConnector()
    config = make_config(max_num_batched_tokens=64)
    driver = Driver(Scheduler(config, connector, b"test" * 8, mixes_prompt_parts=True), connector=connector)
    driver.add(prompt("long", 300), prompt("short", 20))
    assert driver.step().num_scheduled_tokens == {"short": 20, "long": 44}
    driver.add(prompt("another", 10))
    assert driver.step().num_scheduled_tokens == {"another": 10, "long": 54}


def test_a_part_joins_a_part() -> None:
    driver = make_prefill_worker(long_prefill_token_threshold=40)
    driver.add(prompt("first", 300), prompt("second", 300))
    assert driver.step().num_scheduled_tokens == {"first": 40, "second": 24}, "no prompt ends in this step"


def test_a_part_that_the_threshold_cut_joins_no_prompt_that_ends() -> None:
    driver = make_prefill_worker(long_prefill_token_threshold=20)
    driver.add(prompt("long", 300), prompt("short", 10), prompt("as long as a part", 20))
    assert driver.step().num_scheduled_tokens == {"short": 10, "as long as a part": 20}
    assert driver.step().num_scheduled_tokens == {"long": 20}
    driver.add(prompt("another", 10))
    assert driver.step().num_scheduled_tokens == {"another": 10}


def test_a_prompt_longer_than_what_is_left_of_another_waits_for_it() -> None:
    driver = make_prefill_worker()
    driver.add(prompt("first", 200))
    driver.step()
    driver.step()
    driver.add(prompt("second", 100))
    assert driver.step().num_scheduled_tokens == {"first": 64}, "72 were left"
    assert driver.step().num_scheduled_tokens == {"first": 8}
    assert driver.step().num_scheduled_tokens == {"second": 64}


def test_of_waiting_prompts_the_shortest_is_first_and_equal_ones_come_in_their_order() -> None:
    driver = make_prefill_worker()
    driver.add(prompt("long", 100), prompt("short", 30), prompt("also short", 30))
    assert list(driver.step().num_scheduled_tokens) == ["short", "also short"], "as many as fit whole"


@pytest.mark.parametrize(("length", "least", "most"), [(64, 11, 21), (1, 0, 640 // 16 + 11)])
def test_no_stream_of_short_prompts_starves_a_long_one(length: int, least: int, most: int) -> None:
    """Only prompts that arrive before as many tokens as its own were computed can overtake it. A step of few tokens
    takes longer than its tokens say."""
    driver = make_prefill_worker()
    driver.add(prompt("long", 640))
    num_steps = 0
    while "long" not in driver.ends:
        driver.add(prompt(f"short {num_steps}", length))
        driver.step()
        num_steps += 1
    assert least <= num_steps <= most


def test_tokens_in_the_prefix_cache_are_no_work() -> None:
    """The next turn of a chat is short, however long the chat is."""
    driver = make_prefill_worker(max_num_batched_tokens=32)
    chat = [7] * 320
    driver.add(make_request(prompt=chat, request_id="first turn", role=TransferRole.PRODUCER))
    while "first turn" not in driver.ends:
        driver.step()
    driver.add(prompt("long", 200))
    driver.step()
    driver.add(make_request(prompt=chat + [8] * 20, request_id="next turn", role=TransferRole.PRODUCER))
    assert driver.step().num_scheduled_tokens == {"next turn": 20}


def test_beside_requests_that_decode_a_prompt_is_computed_in_parts() -> None:
    driver = make_prefill_worker()
    driver.add(make_request(20, request_id="local"))
    driver.step()
    driver.add(prompt("for another", 100))
    assert driver.step().num_scheduled_tokens == {"local": 1, "for another": 63}


def test_prompts_of_other_requests_are_computed_as_they_come() -> None:
    driver = make_prefill_worker()
    driver.add(make_request(300, request_id="long"))
    driver.step()
    driver.add(make_request(20, request_id="short"))
    assert driver.step().num_scheduled_tokens == {"long": 64}


def test_no_prompt_overtakes_where_another_would_have_to_give_its_blocks_away() -> None:
    driver = make_prefill_worker(num_blocks=21, enable_prefix_caching=False)
    driver.add(prompt("long", 300))
    driver.step()
    driver.add(prompt("short", 20))
    assert driver.step().num_scheduled_tokens == {"long": 64}, "19 of 20 blocks are for the long one"
    while "long" not in driver.ends:
        plan = driver.step()
        assert not plan.preempted_req_ids


def test_with_priorities_a_better_prompt_overtakes_a_worse_one() -> None:
    driver = make_prefill_worker(policy="priority")
    driver.add(prompt("worse", 100, priority=1))
    driver.step()
    driver.add(prompt("better", 200, priority=0))
    assert driver.step().num_scheduled_tokens == {"better": 64}


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_prompts_that_do_not_fit_beside_each_other_do_not_preempt_each_other_in_turn(
    policy: str, enable_prefix_caching: bool
) -> None:
    """A victim returns behind the prompt that took its blocks. If it returned before this prompt, it would take the
    blocks back."""
    driver = make_prefill_worker(
        policy=policy,
        num_blocks=4,
        long_prefill_token_threshold=8,
        enable_prefix_caching=enable_prefix_caching,
    )
    driver.add(prompt("first", 40, arrival_time=0.0), prompt("second", 40, arrival_time=1.0))
    victims: list[str] = []
    while "first" not in driver.ends:
        plan = driver.step()
        assert plan.num_scheduled_tokens["first"] == 8, "in every step"
        victims += plan.preempted_req_ids
    assert set(victims) == {"second"}
    driver.run_to_end(max_steps=6)


def test_a_preempted_prompt_returns_to_its_place_and_a_shorter_one_is_computed_before_it() -> None:
    driver = make_prefill_worker(
        num_blocks=21,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=64,
        enable_prefix_caching=False,
    )
    driver.add(prompt("first", 300))
    for _ in range(3):
        driver.step()
    driver.add(prompt("second", 300))
    driver.step()
    assert driver.step().preempted_req_ids == {"second"}
    assert driver.ends == {"first": FinishReason.HANDED_OVER}
    driver.add(prompt("short", 20))
    assert driver.step().num_scheduled_tokens == {"short": 20}
    driver.run_to_end(max_steps=6)


def test_a_prompt_that_lost_its_part_of_the_step_holds_no_other_part_back() -> None:
    driver = make_prefill_worker(
        policy="priority", num_blocks=5, long_prefill_token_threshold=8, enable_prefix_caching=False
    )
    driver.add(prompt("worse", 40, priority=1))
    driver.step()
    driver.add(make_request(24, request_id="local"), prompt("for another", 32, arrival_time=1.0))
    driver.step()
    driver.step()
    plan = driver.step()
    assert plan.preempted_req_ids == {"worse"}, "it was scheduled before the local request needed its block"
    assert plan.num_scheduled_tokens == {"local": 8, "for another": 8}
    driver.run_to_end()


def test_a_prompt_that_lost_its_blocks_in_this_step_keeps_no_part_out() -> None:
    step, ends = StepPlan(1, 100), prompt("ends", 20)
    step.proceed(ends, 20, ())
    assert step.prompts_that_end == {"ends"}
    step.preempt(ends)
    assert step.prompts_that_end == set()
