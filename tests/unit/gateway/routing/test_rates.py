"""What the router learns of speeds."""

import pytest

from gateway.routing.rates import BYTES_PER_TOKEN, TRANSFER_BYTES_PER_S, LinkRates, MovingAverage, StepTime


def test_an_average_follows_new_values() -> None:
    average = MovingAverage()
    assert average.value is None
    assert average.add(1.0) == 1.0
    for _ in range(10):
        average.add(2.0)
    assert average.value == pytest.approx(2.0, abs=0.15)


def test_a_steps_time_is_a_linear_function_of_its_requests() -> None:
    step = StepTime()
    assert not step.is_measured
    for number in (1, 5, 9, 2, 7, 3):
        step.add(number, 0.01 + 0.002 * number)
    assert (step.start_s, step.per_request_s) == pytest.approx((0.01, 0.002))


def test_steps_of_one_size_say_little_of_others_and_noise_makes_no_request_a_gain() -> None:
    step = StepTime()
    step.add(8, 0.02)
    assert 0.0 < step.per_request_s < 0.001
    assert step.start_s + 8 * step.per_request_s == pytest.approx(0.02)
    for number in (1, 9, 1, 9):
        step.add(number, 0.03 - 0.002 * number)
    assert step.per_request_s > 0.0
    assert step.start_s > 0.0


def test_links_are_taken_to_be_typical_until_they_were_used_and_are_forgotten_with_their_worker() -> None:
    links = LinkRates()
    assert links.seconds_per_token("p0", "d0") == BYTES_PER_TOKEN / TRANSFER_BYTES_PER_S
    links.measured("p0", "d0", 100, 1000, 0.5)  # 10 bytes a token, 2,000 bytes a second
    links.measured("p1", "d0", 100, 1000, 0.05)
    assert links.seconds_per_token("p0", "d0") == pytest.approx(10 / 2_000)
    assert links.seconds_per_token("p1", "d0") == pytest.approx(10 / 20_000)
    assert links.seconds_per_token("p2", "d0") == links.typical_seconds_per_token()
    links.forget("p0")
    assert links.seconds_per_token("p0", "d0") == links.typical_seconds_per_token()
    assert links.seconds_per_token("p1", "d0") == pytest.approx(10 / 20_000)
    links.measured("p1", "d1", 0, 0, 0.0)  # nothing to learn from
