"""Parts: one request's hand-over as the sum of its parts, which are rank transfers or ranks; pure.

A load has arrived when all parts have, and has failed when one has. Then the others are given up, and the load ends
when the last of them is quiet. Of a failed load, only what every part has is kept. Blocks are free when all parts
are.
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
    """All failures so far were postponements."""

    def keep(self, num_valid_tokens: int) -> None:
        have = self.num_valid_tokens
        self.num_valid_tokens = num_valid_tokens if have is None else min(have, num_valid_tokens)


@dataclass(frozen=True, slots=True)
class LoadArrived(Generic[R]):
    """Every part has arrived."""

    parts: list[R]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    num_valid_tokens: int
    reason: str
    is_cancelled: bool
    is_postponed: bool = False
    """All parts were postponed, and wait to be loaded again; otherwise the postponed ones must be aborted."""


@dataclass(frozen=True, slots=True)
class LoadQuiet:
    """Given up by its own worker, and ended."""


@dataclass(frozen=True, slots=True)
class GiveUp(Generic[P]):
    """One part failed: fail these too; each reports `failed`, unless it has arrived meanwhile."""

    parts: tuple[P, ...]
    reason: str
    is_cancelled: bool
    is_postponed: bool = False
    """The part was postponed; postpone these too."""


LoadOutcome = LoadArrived[R] | LoadFailed | LoadQuiet | GiveUp[P] | None


class Loads(Generic[P, R]):
    """Current loads by request, with what their parts have reported. P names a part, R is what it reports."""

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
        """An aborted part has ended."""
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
    """Hand-overs sent, and the parts of each that may still be read."""

    def __init__(self) -> None:
        self._open: dict[str, set[P]] = {}

    def begin(self, request_id: str, parts: Iterable[P]) -> None:
        self._open[request_id] = set(parts)

    def freed(self, request_id: str, part: P) -> bool:
        """This part will not be read any more; returns whether it was the last."""
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
        """Drops a request whose blocks need no report."""
        self._open.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._open)
