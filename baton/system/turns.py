"""FairTurns: the entries that wait for a server, in the order of their turns; pure, and knows no clock.

Callers share the server by what their entries cost: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with
equal weights, like gateway/admission/fair_queue.py, but for costs that may be known only afterwards. The entries of one
caller are taken in order of arrival. So a costly entry delays only its own caller.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class FairTurns(Generic[C, T]):
    """Entries are taken one at a time, and charged to their callers when their cost is known."""

    def __init__(self) -> None:
        self._waiting: defaultdict[C, dict[T, int]] = defaultdict(dict)
        """Entries by caller, in order of arrival. Each entry has a number: all entries are numbered in order of
        arrival."""
        self._num_entries = 0
        self._spent: defaultdict[C, float] = defaultdict(float)
        self._now = 0.0
        """How much the caller that was served last had spent before its turn. A new caller begins with this amount, so
        that idle callers gain no advantage."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, caller: C, entry: T) -> None:
        """Adds an entry of this caller. An entry that waits already keeps its place."""
        if caller not in self._waiting:
            self._spent[caller] = max(self._spent[caller], self._now)
        self._num_entries += 1
        self._waiting[caller].setdefault(entry, self._num_entries)

    def discard(self, caller: C, entry: T) -> None:
        """Removes an entry, unless it was taken already."""
        own = self._waiting.get(caller, {})
        own.pop(entry, None)
        if not own:
            self._waiting.pop(caller, None)

    def take_next(self, may: Callable[[C], bool] = lambda _: True) -> tuple[C, T] | None:
        """The next entry and its caller, among callers for whom `may` is true; None if these have no entry.

        If no entry waits at all, all callers begin anew.
        """
        if not self._waiting:
            self._spent.clear()
            self._now = 0.0
        firsts = [(caller, *next(iter(own.items()))) for caller, own in self._waiting.items() if may(caller)]
        if not firsts:
            return None
        caller, entry, _ = min(firsts, key=lambda first: (self._spent[first[0]], first[2]))
        self._now = max(self._now, self._spent[caller])
        self.discard(caller, entry)
        return caller, entry

    def charge(self, caller: C, cost: float) -> None:
        """Adds the cost of an entry of this caller."""
        self._spent[caller] += cost

    def last_of_largest(self) -> tuple[C, T] | None:
        """The latest entry of the caller with the most entries, with this caller. If several callers have equally many
        entries, the latest of all their entries. None if no entry waits."""
        if not self._waiting:
            return None
        lasts = [(caller, len(own), *next(reversed(own.items()))) for caller, own in self._waiting.items()]
        caller, _, entry, _ = max(lasts, key=lambda last: (last[1], last[3]))
        return caller, entry
