"""Behaviour 19: the classical two-phase scheduler, on worked examples and beside a model of it."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import InvalidRequest
from baton.kv import TransferRole
from scheduler import RequestStatus
from tests.factories.driving import Driver
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    make_request,
    make_scheduler,
    received,
)


def make_driver(num_ahead: int = 0, **settings: Any) -> Driver:
    return Driver(make_scheduler(batching="prefill_first", **settings), num_ahead=num_ahead)


def steps_of(driver: Driver, num_steps: int) -> list[dict[str, int]]:
    return [dict(driver.step().num_scheduled_tokens) for _ in range(num_steps)]


def test_c19_continuous_batching_prefills_every_new_request_before_any_decodes() -> None:
    driver = make_driver(max_num_seqs=3, max_model_len=1024)
    a, b = make_request(512, request_id="A", max_tokens=4), make_request(256, request_id="B", max_tokens=50)
    c, d = make_request(128, request_id="C", max_tokens=50), make_request(200, request_id="D", max_tokens=50)
    driver.add(a)
    assert steps_of(driver, 1) == [{"A": 512}]
    driver.add(b)
    assert steps_of(driver, 2) == [{"B": 256}, {"A": 1, "B": 1}]
    driver.add(c)
    assert steps_of(driver, 1) == [{"C": 128}]
    driver.add(d)
    assert steps_of(driver, 1) == [{"A": 1, "B": 1, "C": 1}], "all three slots are taken"
    assert steps_of(driver, 1) == [{"A": 1, "B": 1, "C": 1}]
    assert a.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert steps_of(driver, 2) == [{"D": 200}, {"B": 1, "C": 1, "D": 1}]


def test_c19_three_prompts_over_one_budget_the_third_waits_whole() -> None:
    driver = make_driver(max_num_batched_tokens=100, max_model_len=100)
    for name, num_tokens in (("R1", 30), ("R2", 50), ("R3", 40)):
        driver.add(make_request(num_tokens, request_id=name, max_tokens=3))
    assert steps_of(driver, 3) == [
        {"R1": 30, "R2": 50},
        {"R3": 40},
        {"R1": 1, "R2": 1, "R3": 1},
    ]


def test_c19_the_budget_is_charged_with_what_is_computed_but_a_prompt_must_fit_whole() -> None:
    driver = make_driver(max_num_batched_tokens=100, max_model_len=100)
    prompt = [*range(64)]
    driver.add(make_request(prompt=[*prompt, 1], request_id="first", max_tokens=1))
    driver.step()
    driver.add(
        make_request(prompt=[*prompt, 2], request_id="hit", max_tokens=1),
        make_request(99, request_id="whole", max_tokens=1),
        make_request(20, request_id="small", max_tokens=1),
    )
    assert steps_of(driver, 2) == [{"hit": 1, "whole": 99}, {"small": 20}]


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
    driver.note(scheduler.update_connector_output(received(consumer))["client"].outputs)
    driver.add(local)
    assert steps_of(driver, 2) == [{local.request_id: 10}, {"D": 1, local.request_id: 1}]


def test_c19_a_prompt_over_the_budget_can_never_run_and_is_refused_with_the_numbers() -> None:
    driver = make_driver(max_num_batched_tokens=100)
    with pytest.raises(InvalidRequest, match=r"prompt: 101 tokens .* one step's budget of 100"):
        driver.add(make_request(101))
    with pytest.raises(ValidationError, match="long_prefill_token_threshold"):
        make_driver(long_prefill_token_threshold=5)


@dataclass
class Sequence:
    """A request as the model below follows it."""

    name: str
    num_tokens: int
    num_left: int


@dataclass
class TwoPhaseModel:
    """The two-phase scheduler in its simplest form: counts of blocks, no prefix cache, no ids."""

    num_free: int
    max_num_seqs: int
    budget: int
    block_size: int = 16
    waiting: deque[Sequence] = field(default_factory=deque)
    running: deque[Sequence] = field(default_factory=deque)

    def step(self) -> dict[str, int]:
        scheduled = self.prefill() or self.decode()
        for seq in list(self.running):
            if seq.name in scheduled:
                held = self.blocks(seq.num_tokens)
                seq.num_tokens, seq.num_left = seq.num_tokens + 1, seq.num_left - 1
                if seq.num_left == 0:
                    self.num_free += held
                    self.running.remove(seq)
        return scheduled

    def prefill(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if sum(scheduled.values()) + seq.num_tokens > self.budget:
                break
            if self.blocks(seq.num_tokens) > self.num_free:
                break
            self.num_free -= self.blocks(seq.num_tokens)
            self.running.append(self.waiting.popleft())
            scheduled[seq.name] = seq.num_tokens
        return scheduled

    def decode(self) -> dict[str, int]:
        scheduled: list[Sequence] = []
        while self.running and len(scheduled) < self.budget:
            seq = self.running.popleft()
            while seq.num_tokens % self.block_size == 1 and self.num_free == 0:
                victim = self.running.pop() if self.running else seq
                self.num_free += self.blocks(victim.num_tokens - 1)
                self.waiting.appendleft(victim)
                if victim is seq:
                    break
            else:
                self.num_free -= seq.num_tokens % self.block_size == 1
                scheduled.append(seq)
        self.running.extendleft(reversed(scheduled))
        return {seq.name: 1 for seq in scheduled}

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@pytest.mark.parametrize("seed", range(60))
def test_c19_step_for_step_like_the_model_of_two_phases(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, max_num_seqs = rng.choice([12, 20]), rng.choice([2, 5, 16])
    settings = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 160}
    driver = make_driver(enable_prefix_caching=False, **settings)
    model = TwoPhaseModel(num_blocks - 1, max_num_seqs, 160)
    arrivals = [(f"r{i}", rng.randrange(1, 90), rng.randrange(1, 60)) for i in range(rng.randrange(2, 15))]
    while arrivals or driver.scheduler.has_requests():
        while arrivals and rng.random() < 0.4:
            name, num_tokens, max_tokens = arrivals.pop(0)
            driver.add(make_request(num_tokens, request_id=name, max_tokens=max_tokens))
            model.waiting.append(Sequence(name, num_tokens, max_tokens))
        expected = model.step()
        assert dict(driver.step().num_scheduled_tokens) == expected
    driver.step()
    driver.check_rest()


def test_c19_both_policies_give_the_same_tokens() -> None:
    outputs = []
    for batching in ("unified", "prefill_first"):
        for num_ahead in (0, 1):
            scheduler = make_scheduler(batching=batching, num_blocks=14, max_num_batched_tokens=200)
            driver = Driver(scheduler, num_ahead=num_ahead)
            driver.add(*(make_request(30 + i, request_id=f"r{i}", max_tokens=30) for i in range(8)))
            outputs.append(driver.run_to_end())
            assert scheduler.counters()["preemptions"] > 0
    assert all(output == outputs[0] for output in outputs)
