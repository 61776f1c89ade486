"""LatencyWindow: how long clients of the last minute waited, in bounded memory; reads no clock and knows no request.

Each second is a slice of its own: a histogram whose bins grow by 2 %, so a percentile is off by at most half of that,
and a million tokens a second take no more room than ten.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

MAX_WINDOW_S = 60.0
"""As far back as it remembers."""

_SLICE_S = 1.0
_GROWTH = math.log(1.02)
_SHORTEST_S = 1e-4
"""Anything shorter counts as this long."""
_NUM_BINS = math.ceil(math.log(1e5 / _SHORTEST_S) / _GROWTH)


@dataclass(slots=True)
class _Slice:
    number: int
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)
    num_finished: int = 0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one window, in seconds: the median and the 99th percentile; zeros if nothing came."""

    ttft_s: tuple[float, float]
    itl_s: tuple[float, float]
    num_finished: int


class LatencyWindow:
    """What came lately. Times that are passed in must not run backwards."""

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque(maxlen=math.ceil(MAX_WINDOW_S / _SLICE_S) + 1)

    def stream(self, arrived_at: float) -> "StreamLatency":
        """For one request that arrived then: to be told of every output, by whichever worker."""
        return StreamLatency(self, arrived_at)

    def finished(self, now: float) -> None:
        """A request ended well."""
        self._at(now).num_finished += 1

    def first_token(self, waited_s: float, now: float) -> None:
        self._at(now).ttft[_bin(waited_s)] += 1

    def next_tokens(self, waited_s: float, num_tokens: int, now: float) -> None:
        """`num_tokens` came together, so long after the one before: all but the first of them took no time."""
        itl = self._at(now).itl
        itl[_bin(waited_s)] += 1
        if num_tokens > 1:
            itl[0] += num_tokens - 1

    def latencies(self, window_s: float, now: float) -> Latencies:
        """Of the last `window_s`, at most MAX_WINDOW_S."""
        ttft, itl, num_finished = Counter[int](), Counter[int](), 0
        oldest = math.floor((now - min(window_s, MAX_WINDOW_S)) / _SLICE_S)
        for part in self._slices:
            if part.number > oldest:
                ttft += part.ttft
                itl += part.itl
                num_finished += part.num_finished
        return Latencies(_percentiles(ttft), _percentiles(itl), num_finished)

    def _at(self, now: float) -> _Slice:
        number = math.floor(now / _SLICE_S)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
        return self._slices[-1]


class StreamLatency:
    """When the tokens of one request reached the gateway, however many workers report them."""

    __slots__ = ("_last_at", "_num_arrived", "_window")

    def __init__(self, window: LatencyWindow, arrived_at: float) -> None:
        self._window = window
        self._last_at = arrived_at
        self._num_arrived = 0

    def tokens(self, first_position: int, num_tokens: int, now: float) -> None:
        """Positions that came before count no more: the second report of token 0, and what an attempt repeats."""
        num_new = first_position + num_tokens - self._num_arrived
        if num_new <= 0:
            return
        waited_s = now - self._last_at
        num_later = num_new
        if not self._num_arrived:
            self._window.first_token(waited_s, now)
            waited_s, num_later = 0.0, num_new - 1
        if num_later:
            self._window.next_tokens(waited_s, num_later, now)
        self._num_arrived += num_new
        self._last_at = now


def _bin(seconds: float) -> int:
    if seconds <= _SHORTEST_S:
        return 0
    return min(_NUM_BINS, math.ceil(math.log(seconds / _SHORTEST_S) / _GROWTH))


def _percentiles(bins: Counter[int]) -> tuple[float, float]:
    return _percentile(bins, 0.5), _percentile(bins, 0.99)


def _percentile(bins: Counter[int], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of all do not exceed; 0 of nothing."""
    left = math.ceil(share * bins.total())
    for number in sorted(bins):
        left -= bins[number]
        if left <= 0:
            return 0.0 if number == 0 else _SHORTEST_S * math.exp((number - 0.5) * _GROWTH)
    return 0.0
