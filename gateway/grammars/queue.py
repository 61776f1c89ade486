"""CompileQueue: grammars that wait, in the order in which they are to be tried; pure, and knows no process.

The caller comes first whose grammars took least time since the queue was last empty; a caller's own come in turn. So
what a hostile text costs puts back its caller alone, and each other caller waits for one grammar at most.
"""

from collections import defaultdict
from typing import Generic, Protocol, TypeVar


class QueuedGrammar(Protocol):
    """What stands in the queue. `number` grows with each that comes."""

    @property
    def number(self) -> int: ...
    @property
    def caller(self) -> str: ...


T = TypeVar("T", bound=QueuedGrammar)


class CompileQueue(Generic[T]):
    """One is taken at a time, and charged when its cost is known."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, dict[T, None]] = defaultdict(dict)
        """By caller, as they came."""
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, entry: T) -> None:
        self._waiting[entry.caller][entry] = None

    def discard(self, entry: T) -> None:
        """One that was taken already is not there any more."""
        own = self._waiting.get(entry.caller, {})
        own.pop(entry, None)
        if not own:
            self._waiting.pop(entry.caller, None)

    def take(self) -> T | None:
        """The next one; None if none waits, and then all callers are even again."""
        if not self._waiting:
            self._spent_s.clear()
            return None
        firsts = [next(iter(own)) for own in self._waiting.values()]
        first = min(firsts, key=lambda entry: (self._spent_s[entry.caller], entry.number))
        self.discard(first)
        return first

    def charge(self, caller: str, took_s: float) -> None:
        """What a grammar of this caller cost."""
        self._spent_s[caller] += took_s

    def last_of_largest(self) -> T | None:
        """The latest of the caller that has most of them waiting; among equals, the one that came last."""
        lasts = [(len(own), next(reversed(own))) for own in self._waiting.values()]
        return max(lasts, key=lambda each: (each[0], each[1].number))[1] if lasts else None
