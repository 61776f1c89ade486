"""Percentiles of what clients waited for, over a window that slides, in memory that does not grow."""

import random

import pytest

from gateway.timing.latency_window import MAX_WINDOW_S, LatencyWindow


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_values(seed: int) -> None:
    window, rng = LatencyWindow(), random.Random(seed)
    values = [rng.lognormvariate(-3.0, 1.0) for _ in range(2000)]
    for value in values:
        window.first_token(value, now=1.0)
    values.sort()
    assert window.latencies(10.0, now=1.5).ttft_s == pytest.approx((values[999], values[1979]), rel=0.011)


def test_values_older_than_the_window_do_not_count() -> None:
    window = LatencyWindow()
    window.first_token(9.0, now=1.0)
    window.first_token(0.1, now=20.0)
    assert window.latencies(30.0, now=20.5).ttft_s[1] == pytest.approx(9.0, rel=0.02)
    assert window.latencies(10.0, now=20.5).ttft_s[1] == pytest.approx(0.1, rel=0.02)
    assert window.latencies(10.0, now=100.0).ttft_s == (0.0, 0.0)


def test_first_tokens_of_the_window_are_counted_though_no_request_has_finished() -> None:
    window = LatencyWindow()
    for now in (1.0, 45.0, 50.0):
        window.first_token(0.1, now)
        window.next_tokens(0.1, 3, now)
    assert window.latencies(MAX_WINDOW_S, now=50.0).num_first_tokens == 3
    assert window.latencies(10.0, now=50.0).num_first_tokens == 2


def test_memory_does_not_grow_with_time_or_tokens() -> None:
    window, rng = LatencyWindow(), random.Random(1)
    for second in range(300):
        for _ in range(100):
            window.next_tokens(rng.uniform(0.0, 1e7), 1, now=float(second))
    assert len(window._slices) <= MAX_WINDOW_S + 1
    assert window.latencies(60.0, now=300.0).itl_s[1] == pytest.approx(
        1e5, rel=0.05
    )  # the last bin takes them all


def test_each_complete_second_of_the_last_minute_is_reported_separately() -> None:
    window = LatencyWindow()
    window.first_token(0.2, now=97.5)
    window.next_tokens(0.03, 4, now=99.1)
    window.finished(now=99.2)
    window.first_token(0.1, now=100.3)  # of a second that is not over

    seconds = window.seconds(now=100.9)

    assert len(seconds) == 60
    assert [second.num_tokens for second in seconds[-3:]] == [1, 0, 4]
    assert seconds[-3].ttft_s == pytest.approx((0.2, 0.2), rel=0.02)
    assert (seconds[-3].itl_s, seconds[-2].ttft_s) == (None, None)
    assert (seconds[-1].num_finished, seconds[-2].num_finished) == (1, 0)
    assert window.seconds(now=101.9)[-1].num_tokens == 1
    assert sum(second.num_tokens for second in window.seconds(now=200.0)) == 0
