"""How long a peer may be silent, by what it did before; times are made up."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.system.adaptive_timeout import AdaptiveTimeout

TIMEOUT_S = 5.0
LEAST_S = 2.0


def after(pauses: Iterable[float]) -> tuple[AdaptiveTimeout, float]:
    """An AdaptiveTimeout that got a message after each of these pauses, and the time of the last message."""
    timeout, now = AdaptiveTimeout(TIMEOUT_S), 100.0
    timeout.on_message(0.0, now)
    for pause_s in pauses:
        now += pause_s
        timeout.on_message(pause_s, now)
    return timeout, now


@pytest.mark.parametrize(
    ("pauses", "limit_s"),
    [
        ([], TIMEOUT_S),
        ([0.5] * 10, TIMEOUT_S),
        ([0.5] * 11, LEAST_S),
        ([0.01] * 600, LEAST_S),
        ([0.5] * 11 + [1.0] + [0.01] * 100, 3.0),
        ([0.5] * 11 + [1.5], 4.5),
        ([0.5] * 11 + [3.0], TIMEOUT_S),
        ([0.5] * 11 + [7.0], LEAST_S),
        ([1.0] + [0.5] * 60, 3.0),
        ([1.0] + [0.5] * 122, LEAST_S),
    ],
    ids=[
        "unheard",
        "new",
        "regular",
        "steady",
        "one-long",
        "longer",
        "longest",
        "stopped",
        "remembered",
        "forgotten",
    ],
)
def test_the_limit_follows_the_longest_recent_pause(pauses: list[float], limit_s: float) -> None:
    timeout, now = after(pauses)
    assert timeout.limit_s(now) == limit_s


def test_a_peer_that_was_never_heard_has_the_whole_timeout() -> None:
    assert AdaptiveTimeout(TIMEOUT_S).limit_s(1e6) == TIMEOUT_S


@given(st.lists(st.floats(0.0, 20.0)), st.floats(0.0, 100.0))
def test_no_limit_is_outside_its_bounds(pauses: list[float], later_s: float) -> None:
    timeout, now = after(pauses)
    assert LEAST_S <= timeout.limit_s(now + later_s) <= TIMEOUT_S
    if pauses and pauses[-1] <= TIMEOUT_S:
        assert timeout.limit_s(now + later_s) >= min(TIMEOUT_S, 3 * pauses[-1])
