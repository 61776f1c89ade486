"""What counts as a thread that stands still, in virtual time."""

import pytest

from baton.clock import VirtualClock
from baton.system.progress import Progress, ProgressObserver

LIMIT_S, LEAST_S, PACE_S = 60.0, 10.0, 2.0


class Scene:
    """A thread, its observer, and their clock."""

    def __init__(self, least_s: float | None = LEAST_S) -> None:
        self.clock = VirtualClock()
        self.progress = Progress("the engine", self.clock, LIMIT_S, least_s)
        self.observer = ProgressObserver((self.progress,), PACE_S)

    def work(self, seconds: float, size: int = 1) -> None:
        self.progress.begin(size)
        self.clock.advance(seconds)
        self.progress.end()

    def noticed_after(self, at_most_s: float, every_s: float = 0.5) -> float | None:
        """How long it takes until the observer sees a standstill, if it does."""
        began_at = self.clock.now()
        while self.clock.now() - began_at < at_most_s:
            if self.observer.look(self.clock.now()) is not None:
                return self.clock.now() - began_at
            self.clock.advance(every_s)
        return None


def test_an_idle_thread_makes_no_progress_and_is_no_hang() -> None:
    scene = Scene()
    assert scene.noticed_after(1_000.0) is None
    scene.work(0.1)
    assert scene.noticed_after(1_000.0) is None


def test_a_piece_that_teaches_nothing_yet_gets_the_whole_limit() -> None:
    scene = Scene()
    scene.progress.begin()
    assert scene.noticed_after(100.0) == pytest.approx(LIMIT_S, abs=0.5)


def test_the_report_names_the_thread_the_time_and_the_limit() -> None:
    scene = Scene()
    scene.progress.begin()
    assert scene.noticed_after(100.0) is not None
    report = scene.observer.look(scene.clock.now())
    assert report == "the engine has made no progress for 60.5 s; its limit is 60.0 s"


@pytest.mark.parametrize(
    ("longest_s", "limit_s"), [(0.01, LEAST_S), (1.0, 20.0), (5.0, LIMIT_S)], ids=["least", "learned", "most"]
)
def test_a_limit_is_twenty_times_the_longest_piece_of_late(longest_s: float, limit_s: float) -> None:
    scene = Scene()
    scene.work(longest_s)
    scene.work(0.001)
    scene.progress.begin()
    assert scene.noticed_after(100.0) == pytest.approx(limit_s, abs=0.5)


def test_what_was_learned_long_ago_is_forgotten() -> None:
    scene = Scene()
    scene.work(1.0)
    for _ in range(520):
        scene.work(0.001)
    scene.progress.begin()
    assert scene.noticed_after(100.0) == pytest.approx(LEAST_S, abs=0.5)


@pytest.mark.parametrize(("size", "limit_s"), [(100, 20.0), (50, 20.0), (200, 40.0), (301, LIMIT_S)])
def test_a_larger_piece_gets_more_in_proportion(size: int, limit_s: float) -> None:
    scene = Scene()
    scene.work(1.0, size=100)
    scene.progress.begin(size)
    assert scene.noticed_after(100.0) == pytest.approx(limit_s, abs=0.5)


def test_pieces_without_a_size_teach_nothing() -> None:
    scene = Scene()
    scene.work(0.001, size=0)
    scene.progress.begin(512)
    assert scene.noticed_after(100.0) == pytest.approx(LIMIT_S, abs=0.5)


def test_without_a_least_limit_nothing_is_learned() -> None:
    scene = Scene(least_s=None)
    scene.work(0.1)
    scene.progress.begin()
    assert scene.noticed_after(100.0) == pytest.approx(LIMIT_S, abs=0.5)


def test_many_short_pieces_are_progress() -> None:
    scene = Scene()
    for _ in range(1_000):
        scene.progress.begin()
        assert scene.noticed_after(0.5) is None


def test_a_process_that_stood_still_does_not_accuse_its_threads() -> None:
    scene = Scene()
    scene.progress.begin()
    assert scene.observer.look(scene.clock.now()) is None
    for _ in range(20):
        scene.clock.advance(1_000.0)
        assert scene.observer.look(scene.clock.now()) is None
    assert scene.noticed_after(100.0) == pytest.approx(LIMIT_S - 20 * PACE_S, abs=0.5)


def test_a_piece_that_follows_at_once_begins_anew() -> None:
    scene = Scene()
    for _ in range(5):
        scene.progress.begin()
        assert scene.noticed_after(LIMIT_S - 1.0) is None
        scene.progress.end()
        scene.progress.begin()
