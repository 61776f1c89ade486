"""Limits of one caller: how often, and how many at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import RateLimited
from gateway.auth.callers import Caller
from gateway.auth.limits import CallerRates, Concurrency, TokenBucket


def count(rates: CallerRates, caller: Caller, now: float, number: int = 1) -> float:
    """Counts `number`, unless the caller must wait. Returns how long the caller must wait."""
    if error := rates.check(caller, now):
        assert error.retry_after_s is not None
        return error.retry_after_s
    rates.count(caller, number, now)
    return 0.0


def test_a_minutes_worth_may_come_at_once_and_then_one_by_one() -> None:
    rates, caller = CallerRates("requests"), Caller("a", requests_per_minute=6)
    assert [count(rates, caller, 100.0) for _ in range(6)] == [0.0] * 6
    error = rates.check(caller, 100.0)
    assert "'a' allows 6 requests per minute" in str(error)
    assert "in 10.0 s" in str(error)
    assert count(rates, caller, 100.0) == pytest.approx(10.0)
    assert count(rates, caller, 110.0) == 0.0
    assert count(rates, caller, 110.0) > 0.0


def test_a_request_may_use_more_tokens_than_are_left_and_the_next_one_waits_for_them() -> None:
    rates, caller = CallerRates("tokens"), Caller("a", tokens_per_minute=600)
    assert count(rates, caller, 0.0, number=10_000) == 0.0
    assert count(rates, caller, 0.0) == pytest.approx((10_000 - 600 + 1) / 10)
    assert count(rates, caller, 900.0) == pytest.approx(40.1), "less what a quarter of an hour brought"
    rates.count(caller, -9_600, 900.0)
    assert count(rates, caller, 900.0) == 0.0, "what was not used after all is given back"


def test_callers_do_not_use_up_each_others_rate_and_some_have_none() -> None:
    rates = CallerRates("requests")
    callers = [Caller(name, requests_per_minute=1) for name in "ab"] + [Caller("c")] * 1000
    assert not any(count(rates, caller, 0.0) for caller in callers)


def test_a_rate_that_is_changed_holds_at_once() -> None:
    rates = CallerRates("requests")
    per_minute = (1, 2, 2, 2)
    waits = [count(rates, Caller("a", requests_per_minute=number), 0.0) for number in per_minute]
    assert waits == [0.0, 0.0, 0.0, 30.0]


def test_a_request_that_began_with_another_rate_counts_against_the_present_one() -> None:
    rates = CallerRates("tokens")
    unlimited, before, after = (Caller("a", tokens_per_minute=number) for number in (None, 600, 60))
    assert rates.check(unlimited, 0.0) is None
    assert rates.check(before, 0.0) is None
    assert count(rates, after, 0.0, number=50) == 0.0
    for running in (unlimited, before):
        rates.count(running, 5, 0.0)
    assert count(rates, after, 0.0) == pytest.approx(1.0), "all 60 tokens are used up"


def test_what_is_used_without_a_limit_does_not_count_against_a_later_limit() -> None:
    rates, limited, unlimited = CallerRates("tokens"), Caller("a", tokens_per_minute=60), Caller("a")
    assert count(rates, limited, 0.0) == 0.0
    assert count(rates, unlimited, 0.0, number=10_000) == 0.0
    assert count(rates, limited, 1.0) == 0.0


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 50)), min_size=1, max_size=200),
)
def test_no_more_pass_than_capacity_and_rate_allow_and_the_hint_is_right(
    per_minute: int, uses: list[tuple[float, int]]
) -> None:
    rate = per_minute / 60.0
    bucket, now, used = TokenBucket(rate, per_minute, 0.0), 0.0, 0
    for pause, number in uses:
        now += pause
        if (wait_s := bucket.wait_s(now)) > 0.0:
            now += wait_s
            assert bucket.wait_s(now) == 0.0
        assert used + 1 <= per_minute + rate * now + 1e-6
        bucket.spend(number, now)
        used += number


def test_a_bounded_number_at_once_and_one_more_when_one_has_ended() -> None:
    running, caller = Concurrency(), Caller("a", max_concurrent=2)
    other = Caller("b", max_concurrent=1)
    assert (running.begin(caller), running.begin(caller)) == (None, None)
    refused = running.begin(caller)
    assert isinstance(refused, RateLimited)
    assert "'a' allows 2 requests at once" in str(refused)
    assert running.begin(other) is None
    running.end(caller)
    assert running.begin(caller) is None
    for each in (caller, caller, other):
        running.end(each)
    assert running._running == {}  # nothing is kept of callers that have left
