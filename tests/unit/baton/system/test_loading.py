"""Loading beside other work; a process may end before the loading ends."""

import sys
import threading
import time
from contextlib import ExitStack

import pytest

from baton.system.loading import Loading


def for_ever() -> None:
    while True:
        time.sleep(0.001)


def test_the_result_is_what_was_made() -> None:
    with Loading(lambda: 7) as loading:
        assert loading.result.result(timeout=10.0) == 7


def test_what_making_raised_is_raised_to_who_asks() -> None:
    def fail() -> int:
        raise ValueError("no such file")

    with Loading(fail) as loading, pytest.raises(ValueError, match="no such file"):
        loading.result.result(timeout=10.0)


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_leaving_does_not_wait_for_what_would_take_for_ever(is_stubborn: bool) -> None:
    running = threading.Event()
    num_swallowed = 0

    def make() -> None:
        nonlocal num_swallowed
        while True:
            running.set()
            try:
                while True:
                    time.sleep(0.001)
            except BaseException:
                num_swallowed += 1
                if not is_stubborn or num_swallowed == 3:
                    raise

    with Loading(make) as loading:
        assert running.wait(60)
    assert loading.result.done()
    assert num_swallowed == (3 if is_stubborn else 1)
    assert "loading" not in [thread.name for thread in threading.enumerate()]


def test_an_interruption_within_a_destructor_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    running = threading.Event()

    class Destroyed:
        def __del__(self) -> None:
            running.set()
            for_ever()

    def make() -> None:
        Destroyed()
        for_ever()

    with Loading(make):
        assert running.wait(60)
    assert not reports
    assert sys.unraisablehook == reports.append


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_beside_the_beginning_leaves_no_thread(has_begun: bool) -> None:
    """Like `baton serve`, the test registers the exit before there is a thread."""

    def begin_and_be_interrupted() -> None:
        with ExitStack() as stack:
            loading = stack.push(Loading(for_ever))
            if has_begun:
                loading.begin()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin_and_be_interrupted()
    assert "loading" not in [thread.name for thread in threading.enumerate()]
