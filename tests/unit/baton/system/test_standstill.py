"""Which part of an observer's time counts. The times are made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.system.standstill import Standstill, pace_of, wait_awake

PACE_S = 1.0


def test_nothing_is_lost_as_long_as_it_looks_often_enough() -> None:
    standstill = Standstill(PACE_S)
    assert [standstill.look(now) for now in (100.0, 100.2, 101.2, 101.2)] == [0.0] * 4
    assert standstill.total_s == 0.0
    assert standstill.next_look == 102.2


def test_of_a_gap_only_one_pace_counts() -> None:
    standstill = Standstill(PACE_S)
    began_at = standstill.running(100.0)
    assert standstill.running(120.0) - began_at == PACE_S
    assert standstill.look(140.0) == 19.0
    assert standstill.total_s == 38.0
    assert standstill.running(140.5) - began_at == 2.5


def test_the_first_look_ends_no_gap() -> None:
    assert Standstill(PACE_S).look(65_536.5) == 0.0


def test_a_clock_that_runs_backwards_loses_nothing() -> None:
    standstill = Standstill(PACE_S)
    assert [standstill.look(now) for now in (5.0, 4.0, 4.5)] == [0.0] * 3


@given(st.lists(st.integers(0, 80), min_size=1))
def test_running_time_never_runs_backwards_nor_faster_than_time(gaps: list[int]) -> None:
    """Gaps are whole eighths of a second, so that sums are exact."""
    standstill, now = Standstill(PACE_S), 0.0
    before = standstill.running(now)
    for gap in gaps:
        now += gap / 8
        after = standstill.running(now)
        assert after - before == min(gap / 8, PACE_S)
        before = after


@pytest.mark.parametrize("limit_s", [0.2, 5.0, 10.0, 300.0])
def test_a_standstill_uses_up_a_quarter_of_a_limit_at_most(limit_s: float) -> None:
    assert pace_of(limit_s) <= limit_s / 4


def test_a_pace_is_no_shorter_than_an_observer_sleeps() -> None:
    assert pace_of(5.0, 60.0) == 60.0
    assert pace_of(0.0) > 0.0


class Waiting:
    """Work that ends after some pieces, on a thread that stands still during one piece."""

    def __init__(self, is_over_at: int) -> None:
        self.is_over_at = is_over_at
        self.pieces: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.pieces.append(seconds)
        return len(self.pieces) == self.is_over_at


def test_a_thread_waits_for_the_whole_time_in_pieces() -> None:
    waiting = Waiting(is_over_at=0)
    assert not wait_awake(waiting.wait, 5.0)
    assert sum(waiting.pieces) == pytest.approx(5.0)
    assert max(waiting.pieces) <= 5.0 / 4


def test_a_thread_waits_no_longer_than_it_must() -> None:
    waiting = Waiting(is_over_at=2)
    assert wait_awake(waiting.wait, 5.0)
    assert len(waiting.pieces) == 2
