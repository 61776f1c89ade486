"""Behaviour 60: whole prompts first, and all running decodes in the same step, as in a chapter on nano-vLLM."""

from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import InvalidRequest
from baton.kv import TransferRole
from tests.factories.driving import Driver
from tests.factories.scheduling import FakeConnector, FakeRunner, make_request, make_scheduler, received
from tests.factories.side_by_side import CLASSICAL, SideBySide


def side_by_side(**settings: Any) -> SideBySide:
    return SideBySide(*CLASSICAL["mixed"], **settings)


def make_driver(num_ahead: int = 0, **settings: Any) -> Driver:
    scheduler = make_scheduler(batching="mixed", async_scheduling=num_ahead > 0, **settings)
    return Driver(scheduler, num_ahead=num_ahead)


def test_c60_the_chapters_timeline() -> None:
    sides = side_by_side(max_num_seqs=3)
    arrivals = {0: ("A", 512, 5), 1: ("B", 256, 50), 3: ("C", 128, 50), 5: ("D", 200, 50)}
    steps = []
    for t in range(7):
        if t in arrivals:
            sides.add(*arrivals[t])
        steps.append(sides.step())
    assert steps == [
        [("A", 512)],
        [("B", 256), ("A", 1)],
        [("A", 1), ("B", 1)],
        [("C", 128), ("A", 1), ("B", 1)],
        [("A", 1), ("B", 1), ("C", 1)],  # A is done
        [("D", 200), ("B", 1), ("C", 1)],  # in A's slot
        [("B", 1), ("C", 1), ("D", 1)],
    ]


def test_c60_without_a_free_slot_a_prompt_waits() -> None:
    sides = side_by_side(max_num_seqs=2)
    for name in "ABC":
        sides.add(name, 30, max_tokens=3)
    assert sides.steps(4) == [{"A": 30, "B": 30}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"C": 30}]


def test_c60_the_first_prompt_without_blocks_ends_admission() -> None:
    sides = side_by_side(num_blocks=5)
    for name, num_tokens in (("A", 20), ("B", 40), ("C", 10)):
        sides.add(name, num_tokens, max_tokens=2)
    assert sides.steps(3) == [{"A": 20}, {"A": 1}, {"B": 40, "C": 10}]


def test_c60_new_prompts_come_first_though_a_running_request_gives_way_for_it() -> None:
    sides = side_by_side(num_blocks=4, enable_prefix_caching=False)
    sides.add("A", 15, max_tokens=9)
    sides.add("B", 10, max_tokens=9)
    assert sides.steps(2) == [{"A": 15, "B": 10}, {"A": 1, "B": 1}]
    sides.add("C", 5, max_tokens=9)
    assert sides.steps(1) == [{"C": 5, "A": 1}], "A's block is B's, not that of C, which has just begun"
    assert sides.model.preempted == ["B"]
    assert sides.driver.scheduler.request_counts().waiting == 1
    sides.finish()


def test_c60_victims_come_from_the_tail_until_the_rest_fits() -> None:
    sides = side_by_side(num_blocks=5, enable_prefix_caching=False)
    for name in "ABCD":
        sides.add(name, 16, max_tokens=3)
    assert sides.steps(2) == [dict.fromkeys("ABCD", 16), {"A": 1, "B": 1}]
    assert sides.model.preempted == ["D", "C"]
    assert sides.steps(2) == [{"A": 1, "B": 1}, {"C": 17, "D": 17}], "in their former order"


def test_c60_a_token_budget_holds_if_one_is_set() -> None:
    driver = make_driver(max_num_batched_tokens=50, max_model_len=50)
    for name, num_tokens in (("A", 20), ("B", 29), ("C", 45), ("D", 4)):
        driver.add(make_request(num_tokens, request_id=name, max_tokens=3))
    assert [list(driver.step().num_scheduled_tokens.items()) for _ in range(4)] == [
        [("A", 20), ("B", 29)],  # C is never split, and D does not overtake it
        [("C", 45), ("D", 4), ("A", 1)],  # B finds no token left
        [("A", 1), ("B", 1), ("C", 1), ("D", 1)],
        [("B", 1), ("C", 1), ("D", 1)],
    ]
    with pytest.raises(InvalidRequest, match=r"one step's budget of 50"):
        driver.add(make_request(51))


def test_c60_a_prompt_that_has_arrived_shares_its_step_with_new_prompts() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, batching="mixed")
    driver = Driver(scheduler, FakeRunner(memory=connector.memory), 0, connector)
    consumer = make_request(40, request_id="D", role=TransferRole.CONSUMER)
    driver.add(consumer)
    driver.step()
    driver.note(scheduler.update_connector_output(received(consumer))["client"])
    driver.add(make_request(10, request_id="A"))
    steps = [dict(driver.step().num_scheduled_tokens) for _ in range(2)]
    assert steps == [{"A": 10, "D": 1}, {"D": 1, "A": 1}]


def test_c60_by_priority_the_worst_of_those_that_decode_gives_way() -> None:
    driver = make_driver(num_blocks=4, policy="priority", enable_prefix_caching=False)
    driver.add(make_request(15, request_id="A", priority=0))
    driver.step()
    driver.add(make_request(15, request_id="B", priority=1))
    assert dict(driver.step().num_scheduled_tokens) == {"B": 15, "A": 1}
    driver.add(make_request(9, request_id="C", priority=2))
    plan = driver.step()
    assert dict(plan.num_scheduled_tokens) == {"C": 9, "A": 1}
    assert plan.preempted_req_ids == {"B"}, "C is worse, but has just begun"
    driver.run_to_end()


def test_c60_a_threshold_that_would_split_prompts_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"long_prefill_token_threshold .*'mixed' never does"):
        make_driver(long_prefill_token_threshold=5)
