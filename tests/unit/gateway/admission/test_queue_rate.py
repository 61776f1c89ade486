"""QueueRate on made-up traces: its predictions are near the truth, and err to the safe side."""

import random
from collections.abc import Callable

import pytest

from gateway.admission.queue_rate import MEMORY_S, QueueRate

Gap = Callable[[random.Random], float]

STEADY: Gap = lambda rng: 0.1  # noqa: ARG005, E731
RANDOM: Gap = lambda rng: rng.expovariate(10.0)  # noqa: E731
IN_BURSTS: Gap = lambda rng: 0.0 if rng.random() < 0.75 else rng.expovariate(2.5)  # noqa: E731


def watch(rng: random.Random, gap: Gap, num_placed: int) -> tuple[QueueRate, float]:
    """A queue that never empties; requests of 1 to 199 tokens leave it."""
    rate, now = QueueRate(), 0.0
    rate.advance(now, is_queue=True)
    for _ in range(num_placed):
        now += gap(rng)
        rate.advance(now, is_queue=True)
        rate.placed(rng.randint(1, 199))
    return rate, now


@pytest.mark.parametrize("gap", [STEADY, RANDOM, IN_BURSTS], ids=["steady", "random", "bursts"])
def test_the_bound_of_the_wait_is_hardly_ever_too_high(gap: Gap) -> None:
    """500 requests of 100 tokens at 10 a second take 50 s."""
    likely, least = [], []
    for seed in range(200):
        rate, _ = watch(random.Random(seed), gap, 200)
        likely.append(rate.likely_wait_s(50_000))
        least.append(rate.least_wait_s(50_000))
    likely.sort()
    assert likely[100] == pytest.approx(50.0, rel=0.1)
    assert sum(wait_s > 50.0 for wait_s in least) <= 10, "it would refuse what may be served"
    assert sum(wait_s > 25.0 for wait_s in least) >= 190, "it would keep what cannot be"


def test_the_rate_is_unknown_after_a_few_moves() -> None:
    rate, _ = watch(random.Random(1), STEADY, 3)
    assert rate.least_wait_s(10**9) == 0.0


def test_time_without_waiting_requests_does_not_slow_the_rate() -> None:
    rate, now = watch(random.Random(1), STEADY, 200)
    before = rate.likely_wait_s(50_000)
    rate.advance(now + 20.0, is_queue=False)
    assert rate.likely_wait_s(50_000) == pytest.approx(before)


def test_old_values_are_forgotten() -> None:
    rate, now = watch(random.Random(1), STEADY, 200)
    rate.advance(now + 10 * MEMORY_S, is_queue=False)
    assert rate.least_wait_s(50_000) == 0.0


def test_a_queue_that_stands_still_gets_slower() -> None:
    rate, now = watch(random.Random(1), STEADY, 200)
    before = rate.likely_wait_s(50_000)
    rate.advance(now + 10.0, is_queue=True)
    assert rate.likely_wait_s(50_000) > before + 5.0


def test_a_queue_that_never_moved_is_expected_to_take_as_long_as_it_stood() -> None:
    rate = QueueRate()
    rate.advance(0.0, is_queue=True)
    rate.advance(5.0, is_queue=True)
    assert rate.likely_wait_s(1) == pytest.approx(5.0, rel=0.1)
