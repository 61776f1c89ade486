"""Requests that each fit alone all end within a bounded number of steps, however few blocks there are."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import SchedulerConfig
from baton.kv import TransferRole
from scheduler import Request, Scheduler
from scheduler.order import MAX_FUTILE_PREEMPTIONS
from tests.factories.driving import Driver
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import FakeConnector, FakeRunner, make_config, make_request

BLOCK_SIZE = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and how many steps it comes after the one before."""

    num_tokens: int
    max_tokens: int
    role: TransferRole | None
    priority: int
    num_steps: int
    is_like_others: bool
    """Its prompt is the beginning of one text, so that it can hit the others' blocks."""


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Long requests are drawn often, since only these preempt one another."""
    mixes: list[list[TransferRole | None]] = [
        [None],
        [TransferRole.PRODUCER],
        [None, TransferRole.PRODUCER],
    ]
    roles = draw(st.sampled_from(mixes))
    lengths = st.one_of(st.integers(1, 30), st.integers(20, 30))
    arrival = st.builds(
        Arrival,
        num_tokens=lengths,
        max_tokens=st.integers(1, 6),
        role=st.sampled_from(roles),
        priority=st.integers(0, 2),
        num_steps=st.sampled_from([0, 0, 1, 5]),
        is_like_others=st.booleans(),
    )
    return draw(st.lists(arrival, min_size=2, max_size=5))


@st.composite
def configs(draw: st.DrawFn, policy: str) -> SchedulerConfig:
    return make_config(
        policy=policy,
        priority_ageing_s=draw(st.sampled_from([0.0, 2.0])) if policy == "priority" else 0.0,
        block_size=BLOCK_SIZE,
        max_num_seqs=draw(st.sampled_from([2, 16])),
        max_num_batched_tokens=draw(st.sampled_from([3, 16, 64])),
        long_prefill_token_threshold=draw(st.integers(0, 6)),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(st.data(), arrivals(), st.integers(0, 8), st.booleans())
@settings(max_examples=120)
def test_requests_that_each_fit_alone_all_end(
    policy: str, data: st.DataObject, arrivals: list[Arrival], num_spare_blocks: int, mixes_prompt_parts: bool
) -> None:
    """The first running request (or the best one, with `priority`) is never preempted for another one. So it
    progresses in each step. Each prompt for another worker may overtake it once, and then it may have to begin again.
    Equals under `priority` may preempt one another until they are spared.
    """
    lengths = [each.num_tokens + (each.max_tokens if each.role is None else 1) for each in arrivals]
    bound = sum(lengths) * (len(arrivals) + 1) * (1 if policy == "fcfs" else MAX_FUTILE_PREEMPTIONS + 1)
    config = data.draw(configs(policy))
    config = config.model_copy(update={"num_blocks": 1 + -(-max(lengths) // BLOCK_SIZE) + num_spare_blocks})
    memory = PagedMemory(BLOCK_SIZE)
    connector = FakeConnector(memory=memory)
    scheduler = Scheduler(config, connector, b"test" * 8, mixes_prompt_parts=mixes_prompt_parts)
    driver = Driver(scheduler, FakeRunner(memory=memory), int(config.async_scheduling), connector)

    num_steps = 0
    for number, arrival in enumerate(arrivals):
        for _ in range(arrival.num_steps):
            driver.step()
        num_steps += arrival.num_steps
        driver.add(to_request(number, arrival, num_steps))
    driver.run_to_end(max_steps=bound)


def to_request(number: int, arrival: Arrival, step: int) -> Request:
    text = 7 if arrival.is_like_others else 1_000 + number
    return make_request(
        request_id=f"r{number}",
        prompt=[text] * arrival.num_tokens,
        max_tokens=arrival.max_tokens,
        ignore_eos=True,
        role=arrival.role,
        priority=arrival.priority,
        arrival_time=float(step),
    )
