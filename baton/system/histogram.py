"""Histogram: how many values fell into which bucket, as Prometheus counts them; cheap enough for each token."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A reading. `num_in` has one number for each bound, and one for all values beyond the last."""

    bounds: tuple[float, ...]
    num_in: tuple[int, ...]
    total: float
    """Sum of all values."""

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, and for infinity, how many values were at most that bound."""
        reached, so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.num_in, strict=True):
            so_far += count
            reached.append((bound, so_far))
        return reached


class Histogram:
    """One thread writes, any thread reads. A reading may lack the latest values; otherwise it is consistent."""

    __slots__ = ("_bounds", "_num_in", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), f"bounds must rise: {bounds}"
        self._bounds = tuple(bounds)
        self._num_in = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Adds a value to the first bucket whose bound the value does not exceed."""
        self._num_in[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_all(self, values: Iterable[float]) -> None:
        """Adds many values. This is cheaper than repeated calls of `add`, since it searches once for each bound, not
        for each value."""
        rising = sorted(values)
        num_before = 0
        for number, bound in enumerate(self._bounds):
            num_up_to = bisect_right(rising, bound, num_before)
            self._num_in[number] += num_up_to - num_before
            num_before = num_up_to
        self._num_in[-1] += len(rising) - num_before
        self._total += sum(rising)

    def counts(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._num_in), self._total)
