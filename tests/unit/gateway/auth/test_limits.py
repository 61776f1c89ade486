"""Limits of one caller: how often, and how many at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import RateLimited
from gateway.auth.callers import Caller
from gateway.auth.limits import Concurrency, RequestRates, TokenBucket


def test_a_minutes_worth_may_come_at_once_and_then_one_by_one() -> None:
    rates, caller = RequestRates(), Caller("a", requests_per_minute=6)
    for _ in range(6):
        rates.count(caller, 100.0)
    with pytest.raises(RateLimited, match=r"'a' allows 6 requests per minute.* in 10\.0 s") as caught:
        rates.count(caller, 100.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    rates.count(caller, 100.0 + caught.value.retry_after_s)
    with pytest.raises(RateLimited):
        rates.count(caller, 110.0)


def test_callers_do_not_use_up_each_others_rate_and_some_have_none() -> None:
    rates = RequestRates()
    rates.count(Caller("a", requests_per_minute=1), 0.0)
    rates.count(Caller("b", requests_per_minute=1), 0.0)
    for _ in range(1000):
        rates.count(Caller("c"), 0.0)


def test_a_rate_that_is_changed_holds_at_once() -> None:
    rates = RequestRates()
    rates.count(Caller("a", requests_per_minute=1), 0.0)
    rates.count(Caller("a", requests_per_minute=2), 0.0)
    rates.count(Caller("a", requests_per_minute=2), 0.0)
    with pytest.raises(RateLimited):
        rates.count(Caller("a", requests_per_minute=2), 0.0)


@given(
    st.integers(1, 600),
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200),
)
def test_no_more_pass_than_capacity_and_rate_allow_and_the_hint_is_right(
    per_minute: int, pauses: list[float]
) -> None:
    rate = per_minute / 60.0
    bucket, now, passed = TokenBucket(rate, per_minute, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        wait_s = bucket.take(now)
        passed += wait_s == 0.0
        assert passed <= per_minute + rate * now + 1e-6
        if wait_s > 0.0:
            now += wait_s
            assert bucket.take(now) == 0.0
            passed += 1


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
