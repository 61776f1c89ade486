"""The time of work, without standstills of the process, in virtual time."""

import pytest

from baton.clock import VirtualClock
from baton.system.progress import Progress
from baton.system.running_clock import RunningClock

PACE_S = 2.0


def test_time_passes_while_somebody_looks() -> None:
    clock = VirtualClock(100.0)
    running = RunningClock(clock, PACE_S)
    for _ in range(10):
        clock.advance(1.5)
        running.look()
    assert running.now() == pytest.approx(115.0)


def test_a_standstill_counts_as_one_pace_before_and_after_the_next_look() -> None:
    clock = VirtualClock()
    running = RunningClock(clock, PACE_S)
    clock.advance(1.0)
    running.look()
    clock.advance(40.0)
    assert running.now() == pytest.approx(1.0 + PACE_S)
    running.look()
    assert running.now() == pytest.approx(1.0 + PACE_S)
    clock.advance(0.5)
    assert running.now() == pytest.approx(1.5 + PACE_S)
    clock.advance(40.0)
    running.look()
    assert running.now() == pytest.approx(1.0 + 2 * PACE_S)


def test_it_never_runs_backwards_even_if_the_process_stands_still_within_a_call() -> None:
    class StoppedClock(VirtualClock):
        """The process is stopped after the next reading; the watch runs first afterwards."""

        is_stopped = False

        def now(self) -> float:
            now = super().now()
            if self.is_stopped:
                self.is_stopped = False
                self.advance(40.0)
                running.look()
            return now

    clock = StoppedClock()
    running = RunningClock(clock, PACE_S)
    clock.advance(1.0)
    running.look()
    clock.is_stopped = True
    assert running.now() == pytest.approx(1.0)
    assert running.now() == pytest.approx(1.0 + PACE_S)


def test_c54_a_step_in_which_the_process_stood_still_does_not_raise_the_limit_of_a_hang() -> None:
    clock = VirtualClock()
    running = RunningClock(clock, PACE_S)
    progress = Progress("the engine", running, limit_s=300.0, least_s=10.0)
    for standstill_s in (0.0, 40.0):
        progress.begin(size=1)
        clock.advance(0.1 + standstill_s)
        progress.end()  # the engine's thread may run before the watch looks
    running.look()
    progress.begin(size=1)
    assert progress.piece is not None
    assert progress.limit_s(progress.piece) <= 20 * PACE_S
