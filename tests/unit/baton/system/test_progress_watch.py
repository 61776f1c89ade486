"""The thread that ends a worker whose threads stand still, on threads that do."""

import threading

import pytest

from baton.clock import SystemClock
from baton.system.progress import Progress
from baton.system.progress_watch import ProgressWatch

LIMIT_S = 0.2


class Watched:
    """A watch over one thread's work, and what it did."""

    def __init__(self, last_words_s: float = 0.05) -> None:
        clock = SystemClock()
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


def test_an_idle_worker_is_left_alone() -> None:
    watched = Watched()
    assert not watched.reported.wait(4 * LIMIT_S)
    watched.watch.stop()
    watched.watch.stop()
    assert watched.watch.hang is None
