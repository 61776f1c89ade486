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


def test_the_report_names_the_thread_the_time_and_the_limit() -> None:
    scene = Scene()
    scene.progress.begin()
    assert scene.noticed_after(100.0) is not None
    report = scene.observer.look(scene.clock.now())
    assert report == "the engine has made no progress for 60.5 s; its limit is 60.0 s"


@pytest.mark.parametrize(
    ("least_s", "learned", "size", "limit_s"),
    [
        pytest.param(LEAST_S, [], 1, LIMIT_S, id="nothing learned yet: the most"),
        pytest.param(LEAST_S, [(0.01, 1), (0.001, 1)], 1, LEAST_S, id="least"),
        pytest.param(LEAST_S, [(1.0, 1), (0.001, 1)], 1, 20.0, id="twenty times the longest piece of late"),
        pytest.param(LEAST_S, [(5.0, 1), (0.001, 1)], 1, LIMIT_S, id="most"),
        pytest.param(LEAST_S, [(1.0, 1), *[(0.001, 1)] * 520], 1, LEAST_S, id="long ago is forgotten"),
        pytest.param(LEAST_S, [(1.0, 100)], 100, 20.0, id="as large"),
        pytest.param(LEAST_S, [(1.0, 100)], 50, 20.0, id="a smaller piece gets no less"),
        pytest.param(LEAST_S, [(1.0, 100)], 200, 40.0, id="a larger piece gets more in proportion"),
        pytest.param(LEAST_S, [(1.0, 100)], 301, LIMIT_S, id="much larger: the most"),
        pytest.param(LEAST_S, [(0.001, 0)], 512, LIMIT_S, id="pieces without a size teach nothing"),
        pytest.param(None, [(0.1, 1)], 1, LIMIT_S, id="without a least limit nothing is learned"),
    ],
)
def test_the_limit_of_a_piece_follows_from_the_pieces_before_it(
    least_s: float | None, learned: list[tuple[float, int]], size: int, limit_s: float
) -> None:
    scene = Scene(least_s)
    for seconds, size_before in learned:
        scene.work(seconds, size_before)
    scene.progress.begin(size)
    assert scene.noticed_after(100.0) == pytest.approx(limit_s, abs=0.5)


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
