"""LogWriter: writes a process's log on a thread of its own, so that logging never waits for the log's reader.

An unread pipe or a full disk loses lines but never delays a request. RepeatLimit keeps an endlessly repeated line from
filling the disk.
"""

import logging
import threading
from collections import deque
from typing import TextIO

from baton.clock import Clock, SystemClock
from baton.system.repeat_limit import RepeatLimit

MAX_WAITING_CHARACTERS = 8 * 2**20
"""Limit for lines that wait to be written; further lines are dropped and counted."""

FLUSH_TIMEOUT_S = 1.0
"""How long the end of the process waits for the last lines."""


class LogWriter(logging.Handler):
    """Lines are written in the order in which they were logged."""

    def __init__(
        self,
        stream: TextIO,
        max_waiting_characters: int = MAX_WAITING_CHARACTERS,
        *,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._clock = clock or SystemClock()
        self._max_waiting_characters = max_waiting_characters
        self._changed = threading.Condition()
        """Guards all fields below."""
        self._limit = RepeatLimit()
        self._waiting: deque[str] = deque()
        """The lines that wait, including the line that is being written."""
        self._num_characters = 0
        self._num_dropped = 0
        self._is_closed = False
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never blocks."""
        with self._changed:
            now = self._clock.now()
            self._append_summaries(self._limit.summaries(now))
            if not self._limit.admits(record, now):
                return
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            self._append_if_room(line)

    def flush(self) -> None:
        """Returns when everything is written, or after FLUSH_TIMEOUT_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Flushes; then the thread ends, unless the stream blocks it."""
        with self._changed:
            self._append_summaries(self._limit.close(self._clock.now()))
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _append_summaries(self, summaries: list[logging.LogRecord]) -> None:
        for summary in summaries:
            self._append_if_room(self.format(summary))

    def _append_if_room(self, line: str) -> None:
        if self._num_characters + len(line) > self._max_waiting_characters:
            self._num_dropped += 1
        else:
            self._append(line)

    def _append(self, line: str) -> None:
        self._waiting.append(line)
        self._num_characters += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while (line := self._next()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the disk is full, or the reader or this process closed the stream
                pass
            self._note_written(line)

    def _next(self) -> str | None:
        """The first waiting line, as soon as there is one; None once the writer is closed."""
        with self._changed:
            while not (self._waiting or self._is_closed):
                self._changed.wait(self._time_to_summary())
                self._append_summaries(self._limit.summaries(self._clock.now()))
            return self._waiting[0] if self._waiting else None

    def _time_to_summary(self) -> float | None:
        """Seconds until the next summary may be due; None if there will be none."""
        end = self._limit.next_end
        return None if end is None else max(0.0, end - self._clock.now())

    def _note_written(self, line: str) -> None:
        with self._changed:
            self._waiting.popleft()
            self._num_characters -= len(line)
            if self._num_dropped and not self._waiting:
                self._append(self._words_on_dropped())
                self._num_dropped = 0
            self._changed.notify_all()

    def _words_on_dropped(self) -> str:
        words = "%d lines were dropped here because the log was not read"
        number = self._num_dropped
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, words, (number,), None))
