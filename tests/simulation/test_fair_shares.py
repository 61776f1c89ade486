"""Eight tenants share a fleet, one of which sends all it can: the others hardly notice."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Literal

import pytest

from baton.config import GatewayConfig
from gateway.admission.shares import CallerShares
from simulator.timed_fleet import TimedFleet
from simulator.workloads import Session, Turn

GREEDY, TENANTS = "greedy", tuple(f"tenant{number}" for number in range(7))
NUM_PER_TENANT, MEAN_PAUSE_S, FIRST_S, END_S = 11, 1.2, 2.0, 20.0
UNSHARED_END_S, PATIENCE_S = 12.0, 4.0
"""Without shares, a shorter time suffices: it only has to show that others wait four times as long as they
would alone."""


def others() -> Iterator[Session]:
    """Each of the other tenants asks every now and then."""
    for tenant in TENANTS:
        rng, now = random.Random(tenant), FIRST_S
        for number in range(NUM_PER_TENANT):
            now += rng.expovariate(1.0 / MEAN_PAUSE_S)
            yield session(rng, tenant, number, now, rng.randint(400, 800), rng.randint(10, 60))


def flood(num_requests: int, num_prompt_tokens: int, num_answer_tokens: int) -> list[Session]:
    """The requests of the eighth tenant: all at once, before the others come."""
    rng = random.Random(GREEDY)
    return [
        session(rng, GREEDY, number, 0.0, num_prompt_tokens, num_answer_tokens)
        for number in range(num_requests)
    ]


def session(
    rng: random.Random, caller: str, number: int, at: float, num_prompt: int, num_answer: int
) -> Session:
    tokens = tuple(rng.getrandbits(30) for _ in range(num_prompt + num_answer))
    turn = Turn(tokens[:num_prompt], tokens[num_prompt:], 0.0)
    return Session(f"{caller}-{number}", at, (), (turn,), caller)


def most_s(greedy: list[Session], num_blocks: int, config: GatewayConfig, end_s: float = END_S) -> float:
    """The second longest time to first token of the other tenants. Requests that come less than PATIENCE_S before the
    end do not count."""
    fleet = TimedFleet(config, 1, 2, (40_000, num_blocks), seed=1)
    asked = [session for session in others() if session.arrival_s < end_s - PATIENCE_S]
    times_of = fleet.run([*asked, *greedy], until_s=end_s).ttft_s_of
    times = [time for tenant in TENANTS for time in times_of.get(tenant, ())]
    never = [end_s] * (len(asked) - len(times))
    return sorted(times + never)[-2]


@cache
def most_alone_s(num_blocks: int, mode: Literal["auto", "disaggregated"]) -> float:
    return most_s([], num_blocks, GatewayConfig(routing_mode=mode, max_in_flight=NUM_PLACES))


NUM_PLACES = 256
FLOODS = {
    "long answers hold every place": ((NUM_PLACES, 30, 4_000), 40_000),
    "long prompts keep the prefill worker busy": ((400, 1_000, 20), 40_000),
    "growing answers take every block": ((200, 100, 6_000), 1_200),
}
"""The numbers of requests and of tokens in a prompt and an answer, and how many blocks a decode worker has."""


@pytest.mark.parametrize(
    ("name", "mode"),
    [*zip(FLOODS, ["auto", "disaggregated", "disaggregated"], strict=True)]
    + [
        pytest.param(*each, marks=pytest.mark.by_hand)
        for each in zip(FLOODS, ["disaggregated", "auto", "auto"], strict=True)
    ],
)
def test_c57_the_others_first_tokens_come_within_twice_the_time_of_being_alone(
    name: str, mode: Literal["auto", "disaggregated"], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, num_blocks = FLOODS[name]
    greedy = flood(*sizes)
    config = GatewayConfig(routing_mode=mode, max_in_flight=NUM_PLACES)
    alone_s, shared_s = most_alone_s(num_blocks, mode), most_s(greedy, num_blocks, config)
    monkeypatch.setattr(CallerShares, "_is_shared", lambda *_: False)
    unshared_s = most_s(greedy, num_blocks, config, UNSHARED_END_S)
    print(f"{name}: alone {alone_s:.3f} s, beside it {shared_s:.3f} s, without shares {unshared_s:.3f} s")
    assert shared_s < 2 * alone_s
    assert unshared_s > 4 * alone_s
