"""LogWriter: a log without a reader, or that cannot be written, delays no caller."""

import errno
import io
import logging
import os
import threading

import pytest

from baton.clock import VirtualClock
from baton.system.log_writer import LogWriter
from baton.system.repeat_limit import MAX_PER_WINDOW, WINDOW_S


class Pipe(io.StringIO):
    """Takes nothing until it `flows`."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = threading.Event()
        self.is_asked = threading.Event()

    def write(self, text: str) -> int:
        self.is_asked.set()
        assert self.flows.wait(30)
        return super().write(text)


def record(words: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("gateway", level, "", 0, words, None, None)


def test_lines_come_out_in_their_order() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream)
    for number in range(1000):
        writer.handle(record(str(number), logging.INFO))
    writer.close()
    assert stream.getvalue().split() == [str(number) for number in range(1000)]


def test_who_logs_waits_for_no_reader_and_what_is_too_much_is_counted() -> None:
    stream = Pipe()
    writer = LogWriter(stream, max_waiting_characters=50)
    for _ in range(8):  # ten characters each
        writer.handle(record("0123456789"))
    assert stream.is_asked.wait(30)
    stream.flows.set()
    writer.flush()
    writer.handle(record("after"))
    writer.close()
    *lines, dropped, after = stream.getvalue().splitlines()
    assert lines == ["0123456789"] * 5
    assert dropped == "3 lines were dropped here because the log was not read"
    assert after == "after"


def test_a_reader_that_stands_still_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.system.log_writer.FLUSH_TIMEOUT_S", 0.05)
    stream = Pipe()
    writer = LogWriter(stream)
    writer.handle(record("last words"))
    writer.close()
    assert stream.getvalue() == ""
    stream.flows.set()


class FullDisk(io.StringIO):
    """A disk that is full until there is room again."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    stream = FullDisk()
    writer = LogWriter(stream, max_waiting_characters=50)
    for _ in range(100):
        writer.handle(record("0123456789", logging.INFO))
        writer.flush()
    stream.is_full = False
    writer.handle(record("after"))
    writer.close()
    assert stream.getvalue().endswith("after\n")
    assert "dropped" not in stream.getvalue(), "nothing was kept for later"


def test_a_line_without_end_is_limited_and_counted_by_the_next_line_of_any_kind() -> None:
    stream, clock = io.StringIO(), VirtualClock()
    writer = LogWriter(stream, clock=clock)
    for _ in range(100_000):
        writer.handle(record("Too many open files"))
    clock.advance(WINDOW_S)
    writer.handle(record("a request", logging.INFO))
    writer.close()
    *lines, summary, last = stream.getvalue().splitlines()
    assert lines == ["Too many open files"] * MAX_PER_WINDOW
    assert summary == "suppressed 99,970 repetitions in 60 s: Too many open files"
    assert last == "a request"


class SteppingClock(VirtualClock):
    """A clock that advances by one window at each reading, once `starts` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = threading.Event()

    def now(self) -> float:
        if self.starts.is_set():
            self.advance(WINDOW_S)
        return super().now()


class Awaited(io.StringIO):
    """Says when it holds a summary."""

    def __init__(self) -> None:
        super().__init__()
        self.is_summarized = threading.Event()

    def write(self, text: str) -> int:
        if "suppressed" in text:
            self.is_summarized.set()
        return super().write(text)


def test_the_count_comes_though_nothing_else_is_logged() -> None:
    stream, clock = Awaited(), SteppingClock()
    writer = LogWriter(stream, clock=clock)
    for _ in range(MAX_PER_WINDOW + 3):
        writer.handle(record("Too many open files"))
    clock.starts.set()
    writer.flush()
    with writer._changed:
        writer._changed.notify_all()  # in place of the minute that the thread waits
    assert stream.is_summarized.wait(30)
    writer.close()
    assert "suppressed 3 repetitions in" in stream.getvalue()
