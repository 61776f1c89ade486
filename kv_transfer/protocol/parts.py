"""Parts: one request's hand-over as the sum of its parts, be they legs of one rank or ranks of one worker; pure.

A load has arrived when all parts have, and has failed when one has; then the others are given up, and it is over when
the last of them is quiet. What is kept of a failed load is what every part has. Blocks are free when all parts are.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
R = TypeVar("R")


@dataclass(slots=True)
class _Load(Generic[P, R]):
    open: set[P]
    arrived: list[R] = field(default_factory=list)
    num_valid_tokens: int | None = None
    reason: str | None = None
    is_cancelled: bool = False
    is_aborted: bool = False
    is_postponed: bool = True
    """Whatever has failed was only put off."""

    def keep(self, num_valid_tokens: int) -> None:
        have = self.num_valid_tokens
        self.num_valid_tokens = num_valid_tokens if have is None else min(have, num_valid_tokens)


@dataclass(frozen=True, slots=True)
class LoadArrived(Generic[R]):
    """Every part is here."""

    parts: list[R]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    num_valid_tokens: int
    reason: str
    is_cancelled: bool
    is_postponed: bool = False
    """All parts were put off, and wait to be loaded again; otherwise those that were have to be aborted."""


@dataclass(frozen=True, slots=True)
class LoadQuiet:
    """Given up by its own worker, and over."""


@dataclass(frozen=True, slots=True)
class GiveUp(Generic[P]):
    """One part failed: these are to fail too, each to be reported by `failed`, unless it has arrived meanwhile."""

    parts: tuple[P, ...]
    reason: str
    is_cancelled: bool
    is_postponed: bool = False
    """It was put off, and so are these to be."""


LoadOutcome = LoadArrived[R] | LoadFailed | LoadQuiet | GiveUp[P] | None


class Loads(Generic[P, R]):
    """Loads under way by request, and what their parts have reported. P names a part, R is what it reports."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load[P, R]] = {}

    def begin(self, request_id: str, parts: Iterable[P]) -> None:
        self._loads[request_id] = _Load(set(parts))

    def abort(self, request_id: str) -> None:
        """The request ended here: every open part is being aborted."""
        if request_id in self._loads:
            self._loads[request_id].is_aborted = True

    def arrived(self, request_id: str, part: P, report: R) -> LoadOutcome[R, P]:
        load = self._close(request_id, part)
        if load is None:
            return None
        load.arrived.append(report)
        return self._outcome(request_id, load)

    def failed(
        self,
        request_id: str,
        part: P,
        num_valid_tokens: int,
        reason: str,
        is_cancelled: bool,
        is_postponed: bool = False,
    ) -> LoadOutcome[R, P]:
        load = self._close(request_id, part)
        if load is None:
            return None
        is_first = load.reason is None
        load.keep(num_valid_tokens)
        load.reason = load.reason or reason
        load.is_cancelled |= is_cancelled
        load.is_postponed &= is_postponed
        if is_first and load.open and not load.is_aborted:
            return GiveUp(tuple(load.open), reason, is_cancelled, is_postponed)
        return self._outcome(request_id, load)

    def quiet(self, request_id: str, part: P) -> LoadOutcome[R, P]:
        """An aborted part is over."""
        load = self._close(request_id, part)
        return None if load is None else self._outcome(request_id, load)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def _close(self, request_id: str, part: P) -> _Load[P, R] | None:
        """The load that a part reports on; None if it is unknown, or the part has reported before."""
        load = self._loads.get(request_id)
        if load is None or part not in load.open:
            return None
        load.open.remove(part)
        return load

    def _outcome(self, request_id: str, load: _Load[P, R]) -> LoadOutcome[R, P]:
        if load.open:
            return None
        del self._loads[request_id]
        if load.is_aborted:
            return LoadQuiet()
        if load.reason is not None:
            is_postponed = load.is_postponed and not load.arrived
            return LoadFailed(load.num_valid_tokens or 0, load.reason, load.is_cancelled, is_postponed)
        return LoadArrived(load.arrived)


class Sends(Generic[P]):
    """Hand-overs given, and the parts of each that somebody may still read."""

    def __init__(self) -> None:
        self._open: dict[str, set[P]] = {}

    def begin(self, request_id: str, parts: Iterable[P]) -> None:
        self._open[request_id] = set(parts)

    def freed(self, request_id: str, part: P) -> bool:
        """Nobody reads this part any more; whether that was the last."""
        parts = self._open.get(request_id)
        if parts is None or part not in parts:
            return False
        parts.remove(part)
        if parts:
            return False
        del self._open[request_id]
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def forget(self, request_id: str) -> None:
        """Nobody waits to hear that it is free."""
        self._open.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._open)
