"""CompileQueue: waiting grammars in the order of compilation; pure, and knows no process.

The first caller is the one whose grammars took the least time since the queue was last empty; a caller's own grammars
come in turn. So a hostile text delays its own caller alone, and other callers wait for one grammar at most.
"""

from collections import defaultdict
from typing import Generic, Protocol, TypeVar


class QueuedGrammar(Protocol):
    """An entry of the queue. `number` grows with each entry."""

    @property
    def number(self) -> int: ...
    @property
    def caller(self) -> str: ...


T = TypeVar("T", bound=QueuedGrammar)


class CompileQueue(Generic[T]):
    """Entries are taken one at a time, and charged when their cost is known."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, dict[T, None]] = defaultdict(dict)
        """By caller, in order of arrival."""
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, entry: T) -> None:
        self._waiting[entry.caller][entry] = None

    def discard(self, entry: T) -> None:
        """Removes an entry, unless it was taken already."""
        own = self._waiting.get(entry.caller, {})
        own.pop(entry, None)
        if not own:
            self._waiting.pop(entry.caller, None)

    def take(self) -> T | None:
        """The next entry; None if none waits, and then all callers are even again."""
        if not self._waiting:
            self._spent_s.clear()
            return None
        firsts = [next(iter(own)) for own in self._waiting.values()]
        first = min(firsts, key=lambda entry: (self._spent_s[entry.caller], entry.number))
        self.discard(first)
        return first

    def charge(self, caller: str, took_s: float) -> None:
        """Adds the cost of a grammar of this caller."""
        self._spent_s[caller] += took_s

    def last_of_largest(self) -> T | None:
        """The latest entry of the caller with the most entries; among equals, the latest of all."""
        lasts = [(len(own), next(reversed(own))) for own in self._waiting.values()]
        return max(lasts, key=lambda each: (each[0], each[1].number))[1] if lasts else None
