"""LatencyWindow: how long clients waited in the last minute, in bounded memory; without clock and requests.

Each second has two histograms whose bins grow by 2 %. So a percentile is wrong by at most 1 %, and a million
tokens in a second take no more memory than ten.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_WINDOW_S = 60.0
"""How far back the window can look."""

_SLICE_S = 1.0
_GROWTH = math.log(1.02)
_SHORTEST_S = 1e-4
"""Shorter times count as this time."""
_NUM_BINS = math.ceil(math.log(1e5 / _SHORTEST_S) / _GROWTH)


@dataclass(slots=True)
class _Slice:
    number: int
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)
    num_finished: int = 0
    bins: NDArray[np.int64] | None = None
    """`ttft` and `itl` as rows of one array; cached when a finished slice is read for the first time."""
    summary: "Second | None" = None
    """The slice's summary, cached when a finished slice is read for the first time."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Median and 99th percentile of one window, in seconds; zeros if no token arrived."""

    ttft_s: tuple[float, float]
    itl_s: tuple[float, float]
    num_first_tokens: int
    """The number of values behind `ttft_s`."""


@dataclass(frozen=True, slots=True)
class Second:
    """One complete second. Percentiles are as in Latencies, but None if no token arrived."""

    ttft_s: tuple[float, float] | None = None
    itl_s: tuple[float, float] | None = None
    num_tokens: int = 0
    num_finished: int = 0


class LatencyWindow:
    """Latencies of the last minute. Times must not run backwards."""

    def __init__(self) -> None:
        self.on_first_token: Callable[[float], None] = lambda _waited_s: None
        """Gets each time to first token, in seconds. Must not raise."""
        self.num_tokens = 0
        """Tokens since the start."""
        self._slices: deque[_Slice] = deque(maxlen=math.ceil(MAX_WINDOW_S / _SLICE_S) + 1)

    def finished(self, now: float) -> None:
        """A request finished with a complete answer."""
        self._at(now).num_finished += 1

    def first_token(self, waited_s: float, now: float) -> None:
        self.num_tokens += 1
        self._at(now).ttft[_bin(waited_s)] += 1
        self.on_first_token(waited_s)

    def next_tokens(self, waited_s: float, num_tokens: int, now: float) -> None:
        """`num_tokens` tokens can be sent together, `waited_s` after the previous token. All but the first of them
        count as a wait of 0 s."""
        self.num_tokens += num_tokens
        itl = self._at(now).itl
        itl[_bin(waited_s)] += 1
        if num_tokens > 1:
            itl[0] += num_tokens - 1

    def latencies(self, window_s: float, now: float) -> Latencies:
        """Latencies of the last `window_s`, at most MAX_WINDOW_S."""
        oldest = math.floor((now - min(window_s, MAX_WINDOW_S)) / _SLICE_S)
        parts = [part for part in self._slices if part.number > oldest]
        ttft, itl = sum((self._bins(part) for part in parts), np.zeros((2, _NUM_BINS + 1), np.int64))
        return Latencies(_percentiles(ttft), _percentiles(itl), int(ttft.sum()))

    def seconds(self, now: float) -> tuple[Second, ...]:
        """Each complete second of the last minute, oldest first."""
        newest = math.floor(now / _SLICE_S) - 1
        complete = {part.number: self._summary(part) for part in self._slices if part.number <= newest}
        return tuple(
            complete.get(number, Second()) for number in range(newest - int(MAX_WINDOW_S) + 1, newest + 1)
        )

    def _summary(self, part: _Slice) -> Second:
        """The summary of a finished second, which no longer changes."""
        if part.summary is None:
            ttft, itl = self._bins(part)
            part.summary = Second(
                _percentiles(ttft) if part.ttft else None,
                _percentiles(itl) if part.itl else None,
                part.ttft.total() + part.itl.total(),
                part.num_finished,
            )
        return part.summary

    def _bins(self, part: _Slice) -> NDArray[np.int64]:
        """A slice's histograms as arrays, so that sixty of them add up quickly."""
        if part.bins is not None:
            return part.bins
        bins = np.zeros((2, _NUM_BINS + 1), np.int64)
        for row, counts in zip(bins, (part.ttft, part.itl), strict=True):
            row[list(counts)] = list(counts.values())
        if part is not self._slices[-1]:
            part.bins = bins
        return bins

    def _at(self, now: float) -> _Slice:
        number = math.floor(now / _SLICE_S)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
        return self._slices[-1]


def _bin(seconds: float) -> int:
    if seconds <= _SHORTEST_S:
        return 0
    return min(_NUM_BINS, math.ceil(math.log(seconds / _SHORTEST_S) / _GROWTH))


def _percentiles(bins: NDArray[np.int64]) -> tuple[float, float]:
    return _percentile(bins, 0.5), _percentile(bins, 0.99)


def _percentile(bins: NDArray[np.int64], share: float) -> float:
    """Nearest-rank percentile: at least this share of the values are not larger. 0 if there are no values."""
    up_to = bins.cumsum()
    number = int(up_to.searchsorted(math.ceil(share * int(up_to[-1]))))
    return 0.0 if number == 0 else _SHORTEST_S * math.exp((number - 0.5) * _GROWTH)
