"""CompileQueue: waiting grammars in the order of compilation; pure, and knows no process.

The first caller is the one whose grammars took the least time since the queue was last empty; a caller's own grammars
come in turn. So a hostile text delays its own caller alone, and other callers wait for one grammar at most.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from baton.errors import RequestError
from baton.sampling import StructuredOutput


@dataclass(eq=False, slots=True)
class GrammarTrial:
    """A grammar that waits to be compiled."""

    number: int
    """Grows with each trial."""
    caller: str
    output: StructuredOutput
    digest: bytes
    """The key under which the verdict is kept."""
    verdict: "asyncio.Future[RequestError | None]"
    """None: it compiles; InvalidRequest: it does not; Overloaded: that could not be determined."""


class CompileQueue:
    """Entries are taken one at a time, and charged when their cost is known."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, dict[GrammarTrial, None]] = defaultdict(dict)
        """By caller, in order of arrival."""
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, entry: GrammarTrial) -> None:
        self._waiting[entry.caller][entry] = None

    def discard(self, entry: GrammarTrial) -> None:
        """Removes an entry, unless it was taken already."""
        own = self._waiting.get(entry.caller, {})
        own.pop(entry, None)
        if not own:
            self._waiting.pop(entry.caller, None)

    def take(self) -> GrammarTrial | None:
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

    def last_of_largest(self) -> GrammarTrial | None:
        """The latest entry of the caller with the most entries; among equals, the latest of all."""
        lasts = [(len(own), next(reversed(own))) for own in self._waiting.values()]
        return max(lasts, key=lambda each: (each[0], each[1].number))[1] if lasts else None
