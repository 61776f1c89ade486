"""LogWriter: a log that nobody reads, or that cannot be written, holds up nobody."""

import errno
import io
import logging
import os
import threading

import pytest

from baton.log_writer import LogWriter


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


def record(words: str) -> logging.LogRecord:
    return logging.LogRecord("gateway", logging.WARNING, "", 0, words, None, None)


def test_lines_come_out_in_their_order() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream)
    for number in range(1000):
        writer.handle(record(str(number)))
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
    assert dropped == "3 lines were dropped here, since nobody read the log"
    assert after == "after"


def test_a_reader_that_stands_still_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.log_writer.FLUSH_TIMEOUT_S", 0.05)
    stream = Pipe()
    writer = LogWriter(stream)
    writer.handle(record("last words"))
    writer.close()
    assert stream.getvalue() == ""
    stream.flows.set()


class FullDisk(io.StringIO):
    """Until there is room again."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    stream = FullDisk()
    writer = LogWriter(stream, max_waiting_characters=50)
    for _ in range(100):
        writer.handle(record("0123456789"))
        writer.flush()
    stream.is_full = False
    writer.handle(record("after"))
    writer.close()
    assert stream.getvalue().endswith("after\n")
    assert "dropped" not in stream.getvalue(), "nothing was kept for later"
