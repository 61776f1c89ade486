"""PrefillTimes: a lower bound that is never too high, and 0 where nothing is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefill_times import MAX_SEEN, MEMORY_S, MIN_SEEN, SHARE, PrefillTimes


def seen(
    num_tokens: int, seconds: float, *, tokens_per_s: float = 1.0, count: int = MIN_SEEN
) -> PrefillTimes:
    times = PrefillTimes()
    times.on_rate("p0", tokens_per_s, 0.0)
    for _ in range(count):
        times.computed("p0", num_tokens, seconds, 0.0)
    return times


def test_a_prompt_takes_at_least_half_the_time_of_shorter_ones() -> None:
    times = seen(1000, 8.0)
    for num_tokens in (1000, 2000, 100_000):
        assert times.least_s({"p0": num_tokens}, 1.0) == 4.0
    for num_tokens in (1, 999):
        assert times.least_s({"p0": num_tokens}, 1.0) == 0.0, "longer ones say nothing"


def test_the_fastest_of_each_size_counts_and_of_these_the_slowest() -> None:
    times = seen(1000, 8.0)
    times.computed("p0", 1000, 6.0, 0.0)
    assert times.least_s({"p0": 5000}, 1.0) == 3.0
    for seconds in (40.0, 20.0, 30.0, 40.0):
        times.computed("p0", 3000, seconds, 0.0)
    assert times.least_s({"p0": 5000}, 1.0) == 10.0


def test_after_a_crowd_the_rate_of_a_single_prompt_counts() -> None:
    times = seen(20, 3.0, tokens_per_s=8000.0)
    times.on_rate("p0", 100.0, 1.0)
    assert times.least_s({"p0": 40}, 2.0) == 40 / 8000
    times.on_rate("p0", 100.0, MEMORY_S - 1.0)
    for _ in range(MIN_SEEN):
        times.computed("p0", 20, 3.0, MEMORY_S - 1.0)
    assert times.least_s({"p0": 40}, MEMORY_S + 1.0) == 40 / 100, "what was best is over"


@pytest.mark.parametrize("now", [0.0, MEMORY_S])
def test_the_time_is_unknown_after_few_prompts_or_long_ago(now: float) -> None:
    assert seen(1000, 8.0).least_s({"p0": 2000}, now) > 0.0
    assert seen(1000, 8.0, count=MIN_SEEN - 1).least_s({"p0": 2000}, now) == 0.0
    assert seen(1000, 8.0).least_s({"p0": 2000}, MEMORY_S + 0.1) == 0.0
    unreported = PrefillTimes()
    unreported.on_rate("p0", 0.0, 0.0)
    for _ in range(MIN_SEEN):
        unreported.computed("p0", 1000, 8.0, 0.0)
    assert unreported.least_s({"p0": 2000}, now) == 0.0


def test_one_worker_that_is_not_known_may_be_fast() -> None:
    times = seen(1000, 8.0)
    assert times.least_s({"p0": 2000, "p1": 2000}, 1.0) == 0.0
    assert times.least_s({"p0": 2000}, 1.0) == 4.0
    assert times.least_s({}, 1.0) == 0.0
    times.forget("p0")
    times.forget("p0")
    assert times.least_s({"p0": 2000}, 1.0) == 0.0


def test_memory_is_bounded() -> None:
    times = PrefillTimes()
    for number in range(10_000):
        times.on_rate("p0", float(10_000 - number), number * 0.5)
        times.computed("p0", 100, 1.0, number * 0.5)
    worker = times._workers["p0"]
    assert len(worker.rates) <= 2 * MEMORY_S + 1
    assert [len(of_size) for of_size in worker.prompts.values()] == [MAX_SEEN]


PROMPT = st.tuples(st.integers(1, 10_000), st.floats(1.0, 5.0))


@given(prompts=st.lists(PROMPT, min_size=1, max_size=60), size=st.integers(1, 20_000))
def test_no_worker_is_taken_for_slower_than_it_can_be(prompts: list[tuple[int, float]], size: int) -> None:
    """A worker takes 50 ms plus 1 ms per token, and longer if other prompts share its steps. A prompt alone never
    takes less than the bound."""

    def alone_s(num_tokens: int) -> float:
        return 0.05 + num_tokens / 1000

    times = PrefillTimes()
    for number, (num_tokens, slower) in enumerate(prompts):
        times.on_rate("p0", 1000.0, float(number))
        times.computed("p0", num_tokens, alone_s(num_tokens) * slower, float(number))
    least_s = times.least_s({"p0": size}, float(len(prompts)))
    assert least_s <= alone_s(size)
    assert SHARE < 1.0
