"""Behaviours 19 and 59: the classical two-phase scheduler on worked examples, most of them beside models of nano-vLLM's
and miniVLLM's. The same models play random workloads in `tests/property/test_classical.py`.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import InvalidRequest
from baton.kv import TransferRole
from baton.request import FinishReason
from tests.factories.driving import Driver
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    make_request,
    make_scheduler,
    received,
)
from tests.factories.side_by_side import CLASSICAL, SideBySide

TWO_PHASES = ["nano_vllm", "mini_vllm"]


def make_driver(num_ahead: int = 0, **settings: Any) -> Driver:
    return Driver(make_scheduler(batching="prefill_first", **settings), num_ahead=num_ahead)


def steps_of(driver: Driver, num_steps: int) -> list[dict[str, int]]:
    return [dict(driver.step().num_scheduled_tokens) for _ in range(num_steps)]


def side_by_side(rules: str = "nano_vllm", **settings: Any) -> SideBySide:
    return SideBySide(*CLASSICAL[rules], **settings)


@pytest.mark.parametrize("rules", TWO_PHASES)
def test_c19_continuous_batching_prefills_every_new_request_before_any_decodes(rules: str) -> None:
    sides = side_by_side(rules, max_num_seqs=3)
    sides.add("A", 512, max_tokens=4)
    assert sides.steps(1) == [{"A": 512}]
    sides.add("B", 256)
    assert sides.steps(2) == [{"B": 256}, {"A": 1, "B": 1}]
    sides.add("C", 128)
    assert sides.steps(1) == [{"C": 128}]
    sides.add("D", 200)
    assert sides.steps(1) == [{"D": 200}], "three run, but this step has places"
    assert sides.steps(2) == [{"A": 1, "B": 1, "C": 1}] * 2, "a decode step has three, for the first ones"
    assert "A" in sides.driver.ends
    assert sides.steps(1) == [{"B": 1, "C": 1, "D": 1}]


@pytest.mark.parametrize("rules", TWO_PHASES)
def test_c59_places_are_counted_by_step_and_the_first_ones_decode(rules: str) -> None:
    sides = side_by_side(rules, max_num_seqs=2)
    for name in "ABCDE":
        sides.add(name, 10, max_tokens=3)
    assert sides.steps(3) == [{"A": 10, "B": 10}, {"C": 10, "D": 10}, {"E": 10}]
    assert sides.driver.scheduler.request_counts().running == 5
    assert sides.steps(6) == [{"A": 1, "B": 1}] * 2 + [{"C": 1, "D": 1}] * 2 + [{"E": 1}] * 2
    sides.finish()


@pytest.mark.parametrize("rules", TWO_PHASES)
def test_c59_the_last_one_gives_way_though_it_has_never_decoded(rules: str) -> None:
    sides = side_by_side(rules, max_num_seqs=1, num_blocks=4, enable_prefix_caching=False)
    sides.add("A", 16, max_tokens=20)
    sides.add("B", 14, max_tokens=2)
    sides.add("C", 16, max_tokens=2)
    assert sides.steps(3) == [{"A": 16}, {"B": 14}, {"C": 16}]
    assert sides.steps(1) == [{"A": 1}], "A needs a second block, and none is left"
    assert sides.model.preempted == ["C"]
    assert sides.steps(15) == [{"A": 1}] * 15, "C needs two blocks now, none is free"
    assert sides.steps(1) == [{"A": 1}], "its third block is B's"
    assert sides.model.preempted == ["B"]
    assert sides.steps(2) == [{"A": 1}] * 2
    assert sides.steps(1) == [{"B": 15}], "the latest victim is first in the queue"
    sides.finish()


def test_c59_mini_vllm_makes_room_for_the_first_request_that_has_no_place() -> None:
    steps = {}
    for rules in TWO_PHASES:
        sides = side_by_side(rules, max_num_seqs=1, num_blocks=4, enable_prefix_caching=False)
        sides.add("A", 10, max_tokens=3)
        sides.add("B", 16, max_tokens=2)
        sides.add("C", 10, max_tokens=2)
        assert sides.steps(3) == [{"A": 10}, {"B": 16}, {"C": 10}]
        steps[rules] = sides.steps(3)
        sides.finish()
    assert steps["nano_vllm"] == [{"A": 1}, {"A": 1}, {"B": 1}], "B finds A's block when it decodes"
    assert steps["mini_vllm"] == [{"A": 1}, {"C": 11}, {"A": 1}], "C gives way at once, and comes back"


def test_c59_mini_vllm_preempts_no_one_for_a_request_that_gave_way_itself() -> None:
    """The request now lacks all of its swapped blocks."""
    driver = make_driver(
        prefill_first_rules="mini_vllm",
        policy="priority",
        preemption="swap",
        num_swap_blocks=8,
        max_num_seqs=1,
        num_blocks=4,
        enable_prefix_caching=False,
    )
    for name, num_tokens, priority in (("A", 10, 0), ("B", 16, 9), ("C", 10, 5)):
        driver.add(make_request(num_tokens, request_id=name, priority=priority, max_tokens=3))
        driver.step()
    plan = driver.step()
    assert set(plan.num_scheduled_tokens) == {"A"}
    assert driver.scheduler.request_counts().running == 2, "only B has given way"
    driver.run_to_end()


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("nano_vllm", [{"hit": 1, "whole": 99}, {"small": 20}]),
        ("mini_vllm", [{"hit": 1}, {"whole": 99}, {"small": 20}]),
    ],
)
def test_c59_what_is_cached_is_charged_to_the_budget_by_mini_vllm_alone(
    rules: str, expected: list[dict[str, int]]
) -> None:
    sides = side_by_side(rules, max_num_batched_tokens=100)
    sides.add("first", [*range(64), 1], max_tokens=1)
    sides.step()
    sides.add("hit", [*range(64), 2], max_tokens=1)
    sides.add("whole", 99, max_tokens=1)
    sides.add("small", 20, max_tokens=1)
    assert sides.steps(len(expected)) == expected


def test_c59_mini_vllm_ends_a_request_at_its_own_limit() -> None:
    sides = side_by_side("mini_vllm")
    sides.add("A", 10, max_model_len=12)
    sides.add("B", 10, max_tokens=3, max_model_len=40)
    assert sides.steps(3) == [{"A": 10, "B": 10}, {"A": 1, "B": 1}, {"B": 1}]
    sides.finish()
    assert sides.driver.ends == {"A": FinishReason.LENGTH, "B": FinishReason.LENGTH}


@pytest.mark.parametrize("rules", TWO_PHASES)
def test_c05_decodes_keep_to_the_budget(rules: str) -> None:
    driver = make_driver(prefill_first_rules=rules, max_num_batched_tokens=20, max_num_seqs=30, num_blocks=40)
    driver.add(*(make_request(10, request_id=f"r{i}", max_tokens=3) for i in range(24)))
    assert [sum(step.values()) for step in steps_of(driver, 12)] == [20] * 12
    assert [len(step) for step in steps_of(driver, 4)] == [20, 20, 4, 4]
    driver.run_to_end()


def test_c59_no_local_prompt_takes_the_place_of_one_that_has_arrived() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, batching="prefill_first", max_num_seqs=1)
    driver = Driver(scheduler, FakeRunner(memory=connector.memory), 0, connector)
    consumer = make_request(40, request_id="D", role=TransferRole.CONSUMER, max_tokens=3)
    driver.add(consumer)
    driver.step()
    driver.add(make_request(10, request_id="A", max_tokens=3))
    assert steps_of(driver, 1) == [{"A": 10}]
    driver.note(scheduler.update_connector_output(received(consumer))["client"])
    driver.add(make_request(11, request_id="B", max_tokens=2))
    assert steps_of(driver, 2) == [{"A": 1}] * 2, "A decodes in the only place"
    assert steps_of(driver, 4) == [{"D": 1}, {"B": 11}, {"D": 1}, {"B": 1}]
    driver.run_to_end()


def test_c59_local_prompts_do_not_keep_a_load_from_its_place() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, batching="prefill_first", max_num_seqs=1)
    driver = Driver(scheduler, FakeRunner(memory=connector.memory), 0, connector)
    driver.add(make_request(10, request_id="A", max_tokens=3))
    driver.step()
    consumer = make_request(40, request_id="D", role=TransferRole.CONSUMER, max_tokens=3)
    driver.add(consumer, make_request(11, request_id="B", max_tokens=2))
    assert steps_of(driver, 2) == [{"A": 1}] * 2, "D waits for A's place, and B behind it"
    assert not connector.started
    assert steps_of(driver, 1) == [{"B": 11}], "it costs D's load no time"
    assert "D" in connector.started


@pytest.mark.parametrize("rules", TWO_PHASES)
def test_c19_three_prompts_over_one_budget_the_third_waits_whole(rules: str) -> None:
    sides = side_by_side(rules, max_num_batched_tokens=100)
    for name, num_tokens in (("R1", 30), ("R2", 50), ("R3", 40)):
        sides.add(name, num_tokens, max_tokens=3)
    assert sides.steps(3) == [
        {"R1": 30, "R2": 50},
        {"R3": 40},
        {"R1": 1, "R2": 1, "R3": 1},
    ]


def test_c19_decode_preempts_from_the_back_and_the_victim_is_prefilled_next() -> None:
    driver = make_driver(num_blocks=5, enable_prefix_caching=False)
    driver.add(make_request(32, request_id="old", max_tokens=5), make_request(31, request_id="young"))
    assert steps_of(driver, 1) == [{"old": 32, "young": 31}]
    plan = driver.step()  # old needs a third block, and none is left
    assert plan.num_scheduled_tokens == {"old": 1}
    assert plan.preempted_req_ids == {"young"}
    assert steps_of(driver, 3) == [{"old": 1}] * 3, "two blocks are needed, one is free"
    assert steps_of(driver, 1) == [{"young": 32}]
    assert len(driver.run_to_end()["young"]) == 16


def test_c19_a_received_prompt_joins_the_decodes_after_waiting_prefills() -> None:
    connector = FakeConnector()
    scheduler = make_scheduler(connector, batching="prefill_first")
    driver = Driver(scheduler, FakeRunner(memory=connector.memory), 0, connector)
    consumer, local = make_request(40, request_id="D", role=TransferRole.CONSUMER), make_request(10)
    driver.add(consumer)
    driver.step()
    driver.note(scheduler.update_connector_output(received(consumer))["client"])
    driver.add(local)
    assert steps_of(driver, 2) == [{local.request_id: 10}, {"D": 1, local.request_id: 1}]


def test_c19_a_prompt_over_the_budget_can_never_run_and_is_refused_with_the_numbers() -> None:
    driver = make_driver(max_num_batched_tokens=100)
    with pytest.raises(InvalidRequest, match=r"prompt: 101 tokens .* one step's budget of 100"):
        driver.add(make_request(101))
    with pytest.raises(ValidationError, match="long_prefill_token_threshold"):
        make_driver(long_prefill_token_threshold=5)


def test_c59_mini_vllms_rules_need_two_phases() -> None:
    with pytest.raises(ValidationError, match=r"prefill_first_rules \('mini_vllm'\) needs .* not 'unified'"):
        make_scheduler(prefill_first_rules="mini_vllm")


def test_c19_all_policies_give_the_same_tokens() -> None:
    outputs = []
    for batching in ("unified", "prefill_first", "mixed"):
        for num_ahead in (0, 1):
            scheduler = make_scheduler(batching=batching, num_blocks=14, max_num_batched_tokens=200)
            driver = Driver(scheduler, num_ahead=num_ahead)
            driver.add(*(make_request(30 + i, request_id=f"r{i}", max_tokens=30) for i in range(8)))
            outputs.append(driver.run_to_end())
            assert scheduler.counters()["preemptions"] > 0
    assert all(output == outputs[0] for output in outputs)
