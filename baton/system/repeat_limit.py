"""RepeatLimit: which lines of a log are written when one is repeated without end; knows no stream and no thread."""

import re
from collections import OrderedDict
from dataclasses import dataclass
from logging import WARNING, LogRecord

WINDOW_S = 60.0
MAX_PER_WINDOW = 30
"""The most lines of one kind. A kind is a logger, a level, and the first line of the message before its values
are filled in; all numbers count as equal."""

MAX_KINDS = 1000
"""The most kinds that are watched at once. If there are more, the oldest window ends early."""

_MAX_CHARACTERS = 200
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

_Kind = tuple[str, int, str]


@dataclass(slots=True)
class _Window:
    began_at: float
    num_written: int = 0
    num_suppressed: int = 0


class RepeatLimit:
    """Decides which warnings and errors are written: at most MAX_PER_WINDOW of each kind in WINDOW_S. A summary then
    says how many were left out.

    Lower levels are always written. Not safe across threads. `now` never decreases.
    """

    def __init__(self) -> None:
        self._windows: OrderedDict[_Kind, _Window] = OrderedDict()
        """In the order in which they began."""
        self._summaries: list[LogRecord] = []
        """Summaries of windows that have ended."""

    @property
    def next_end(self) -> float | None:
        """When `summaries` may next have something new."""
        first = next(iter(self._windows.values()), None)
        return None if first is None else first.began_at + WINDOW_S

    def admits(self, record: LogRecord, now: float) -> bool:
        """Counts the record. Returns whether to write it."""
        if record.levelno < WARNING:
            return True
        self._end_windows(now)
        kind = _kind_of(record)
        if kind not in self._windows:
            if len(self._windows) >= MAX_KINDS:
                self._end_first_window(now)
            self._windows[kind] = _Window(now)
        window = self._windows[kind]
        is_admitted = window.num_written < MAX_PER_WINDOW
        if is_admitted:
            window.num_written += 1
        else:
            window.num_suppressed += 1
        return is_admitted

    def summaries(self, now: float) -> list[LogRecord]:
        """The summaries that are due. Each says what was left out of a window that has ended. Each is returned once."""
        self._end_windows(now)
        due, self._summaries = self._summaries, []
        return due

    def close(self, now: float) -> list[LogRecord]:
        """The summaries of all windows."""
        while self._windows:
            self._end_first_window(now)
        return self.summaries(now)

    def _end_windows(self, now: float) -> None:
        while (end := self.next_end) is not None and end <= now:
            self._end_first_window(now)

    def _end_first_window(self, now: float) -> None:
        (logger, level, words), window = self._windows.popitem(last=False)
        if window.num_suppressed:
            arguments = (f"{window.num_suppressed:,}", now - window.began_at, words)
            text = "suppressed %s repetitions in %.0f s: %s"
            self._summaries.append(LogRecord(logger, level, "", 0, text, arguments, None))


def _kind_of(record: LogRecord) -> _Kind:
    words = str(record.msg).partition("\n")[0][:_MAX_CHARACTERS]
    return record.name, record.levelno, _NUMBERS.sub("#", words)
