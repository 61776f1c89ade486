"""The thread that ends a worker whose threads stand still, on threads that do."""

import threading
import time

import pytest

from baton.clock import Clock, SystemClock
from baton.system.progress import Progress
from baton.system.progress_watch import PACE_S, ProgressWatch
from baton.system.running_clock import RunningClock

LIMIT_S = 0.2


class Watched:
    """A watch over one thread's work, and what it did."""

    def __init__(self, last_words_s: float = 0.05, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.progress = Progress("the engine", clock, LIMIT_S)
        self.reported, self.ended = threading.Event(), threading.Event()
        self.watch = ProgressWatch((self.progress,), clock, self.reported.set, self.ended.set, last_words_s)
        self.watch.start()


def test_c54_a_piece_that_never_ends_is_reported_and_then_ends_the_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    watched = Watched()
    watched.progress.begin()
    assert watched.ended.wait(30)
    assert watched.reported.is_set()
    assert watched.watch.hang is not None
    assert watched.watch.hang.startswith("the engine has made no progress for ")
    assert "in test_c54" in capfd.readouterr().err, "where each thread stood"
    watched.watch.stop()


def test_a_worker_that_stops_meanwhile_is_not_ended() -> None:
    watched = Watched(last_words_s=300.0)
    watched.progress.begin()
    assert watched.reported.wait(30)
    watched.watch.stop()
    assert not watched.ended.is_set()


class JumpingClock(SystemClock):
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def test_a_standstill_of_the_process_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = JumpingClock()
    watched = Watched(clock=clock)
    deadline = time.monotonic() + 30.0
    while "this process stood still for " not in caplog.text:
        assert time.monotonic() < deadline
        clock.ahead_s += 5.0
        time.sleep(0.1)
    watched.watch.stop()
    assert not watched.reported.is_set()


def test_the_clock_of_steps_runs_from_the_start_of_the_watch_though_it_was_made_long_before() -> None:
    """A worker makes the watch before the other ranks are connected."""
    clock = JumpingClock()
    running = RunningClock(clock, PACE_S)
    clock.ahead_s += 1000.0
    watch = ProgressWatch((), clock, lambda: None, on_look=running.look)
    watch.start()
    began_s = running.now()
    clock.ahead_s += PACE_S / 2
    assert running.now() - began_s >= PACE_S / 2
    watch.stop()


def test_an_idle_worker_is_left_alone() -> None:
    watched = Watched()
    assert not watched.reported.wait(4 * LIMIT_S)
    watched.watch.stop()
    watched.watch.stop()
    assert watched.watch.hang is None
