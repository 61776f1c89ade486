"""Progress: whether a thread makes progress with its work; pure, except for the clock that the thread reads.

Heartbeats are sent by another thread, so they say nothing about the thread that computes. The computing
thread records its pieces of work here, and an observer on another thread notices a piece that does not end.
"""

from dataclasses import dataclass

from baton.clock import Clock
from baton.system.standstill import Standstill

_TIMES_THE_LONGEST = 20.0
"""A piece may take this many times as long as the longest recent piece. A larger piece may take longer, in
proportion."""
_NUM_RECENT_PIECES = 256
"""The last 256 to 512 pieces count as recent."""


@dataclass(frozen=True, slots=True)
class PieceOfWork:
    """A piece of work that has begun. Each piece is an object of its own, so an observer can tell pieces apart."""

    began_at: float
    size: int


@dataclass(frozen=True, slots=True)
class _Extremes:
    """The longest and the largest of finished pieces."""

    longest_s: float = 0.0
    largest: int = 0


class Progress:
    """One thread's work. Only this thread may call `begin` and `end`; all threads may read."""

    def __init__(self, what: str, clock: Clock, limit_s: float, least_s: float | None = None) -> None:
        """A piece may take `limit_s` seconds. With `least_s`, the limit is learned.

        A learned limit is 20 times the longest recent piece. For a piece that is n times as large as the
        largest recent one, the limit is n times as long. It is at least `least_s` and at most `limit_s`.
        Before the first piece with a size, it is `limit_s`.
        """
        self.what = what
        self._clock = clock
        self._limit_s = limit_s
        self._least_s = least_s
        self._piece: PieceOfWork | None = None
        self._recent = self._before = _Extremes()
        self._num_recent = 0

    def now(self) -> float:
        """The present time on the clock that measures pieces of work."""
        return self._clock.now()

    def begin(self, size: int = 0) -> None:
        """Begins a piece of work, and ends the piece before it.

        `size` is in any unit (tokens for a step). Nothing is learned from pieces without a size.
        """
        self.end()
        self._piece = PieceOfWork(self._clock.now(), size)

    def end(self) -> None:
        """Ends the piece of work without beginning another one. May be repeated."""
        piece, self._piece = self._piece, None
        if piece is None or piece.size == 0 or self._least_s is None:
            return
        if self._num_recent >= _NUM_RECENT_PIECES:
            self._before, self._recent, self._num_recent = self._recent, _Extremes(), 0
        recent, took_s = self._recent, self._clock.now() - piece.began_at
        self._recent = _Extremes(max(recent.longest_s, took_s), max(recent.largest, piece.size))
        self._num_recent += 1

    @property
    def piece(self) -> PieceOfWork | None:
        """The piece of work that has begun; None between two pieces."""
        return self._piece

    def limit_s(self, piece: PieceOfWork) -> float:
        """How long this piece may take."""
        if self._least_s is None:
            return self._limit_s
        recent, before = self._recent, self._before
        largest = max(recent.largest, before.largest)
        if not largest:
            return self._limit_s
        longest_s = max(recent.longest_s, before.longest_s) * max(1.0, piece.size / largest)
        return min(self._limit_s, max(self._least_s, _TIMES_THE_LONGEST * longest_s))


class ProgressObserver:
    """Measures how long pieces of work take, without standstills of the process. One thread calls `look`."""

    def __init__(self, observed: tuple[Progress, ...], pace_s: float) -> None:
        """`pace_s`: the longest time from one call of `look` to the next. If more time passes, the excess counts as
        standstill."""
        self._standstill = Standstill(pace_s)
        self._seen: dict[Progress, tuple[PieceOfWork, float]] = {}
        self._observed = observed

    def look(self, now: float) -> str | None:
        """What stands still, in words, or None."""
        running_s = self._standstill.running(now)
        for progress in self._observed:
            piece = progress.piece
            if piece is None:
                self._seen.pop(progress, None)
                continue
            seen, since_s = self._seen.get(progress, (None, running_s))
            if seen is not piece:
                self._seen[progress] = (piece, running_s)
            elif (took_s := running_s - since_s) > (limit_s := progress.limit_s(piece)):
                return (
                    f"{progress.what} has made no progress for {took_s:.1f} s; its limit is {limit_s:.1f} s"
                )
        return None
