"""FairQueue: waiting requests, in the order in which to serve them; pure, and does not know which workers have room.

Lower priority values come first. Within one priority, requests that ran before come first, in order of arrival, unless
they were taken back. For all other requests, callers share by start-time fair queueing (Goyal, Vin, Cheng: "Start-time
Fair Queueing", SIGCOMM 1996). All callers have the same weight:

    each served token moves the start of its caller's next request to a later virtual time
    the current virtual time is the start of the request that was served last
    a new caller starts at the current virtual time, so idle callers gain no advantage

Of two callers with waiting requests, neither gets ahead of the other by more tokens than their two largest requests
have together. How many requests a caller has makes no difference. A request that leaves the queue unserved costs
its caller nothing. Once the queue is empty, all callers are equal again.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Generic, TypeVar

from baton.errors import RequestError
from gateway.routing.placement import NoRoom

T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry(Generic[T]):
    """One request in the queue. While it waits, only `reason` and the fields after it change."""

    item: T
    caller: str
    """The caller's name. Callers of the same priority share the workers fairly."""
    num_tokens: int
    """The request's likely cost, at least 1."""
    priority: int = 0
    is_resumed: bool = False
    """The request ran before. The queue never refuses it in favour of other requests."""
    was_taken_back: bool = False
    """The request ran, and was taken back since its caller held more than its share. Now it waits for the
    caller's turn, before the caller's other requests."""
    needs: Callable[[], object] = lambda: None
    """Returns what the request needs of a worker. If two entries have equal needs, both find a worker, or neither
    does. Each sweep calls this."""
    begin_by: float | None = None
    """A placement after this time cannot meet the deadline."""
    deadline: float | None = None
    """When the entry must have left the queue."""
    patience_s: float = math.inf
    """How long the entry may wait without moving up in the queue. A standstill of this process does not count as
    waiting."""
    number: int = 0
    """The entries are numbered in the order in which they join."""
    since: float = 0.0
    reason: RequestError | None = None
    """Why the latest try did not place it."""
    tried_in: int = 0
    """The number of the sweep that made the latest try."""
    num_passed: int = 0
    """How many later entries were placed before it."""
    num_before: int = 0
    """How many entries were before it when its patience began. At first: the number of all other entries."""
    num_placed_then: int = 0
    """How many entries the queue had placed when its patience began."""
    lost_workers_at: float = -math.inf
    """When the entry last lost its workers: a try found that no worker can run it, unlike the try before. -inf: not
    since the entry's patience began."""

    @property
    def goes_first(self) -> bool:
        """Whether the entry comes before requests that wait for their callers' turns."""
        return self.is_resumed and not self.was_taken_back

    @property
    def has_workers(self) -> bool:
        """True if the latest try found workers for the entry, or if there was no try yet. Then the entry waits for its
        turn, or for room."""
        return self.reason is None or isinstance(self.reason, NoRoom)


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One caller's entries at one priority."""

    begins_at: float
    """The virtual time at which the first entry begins."""
    entries: dict[QueueEntry[T], None] = field(default_factory=dict)
    """In order of arrival, but entries that were taken back come first."""
    num_tokens: int = 0

    def add(self, entry: QueueEntry[T]) -> None:
        if entry.was_taken_back:
            self.entries = {entry: None, **self.entries}
        self.entries[entry] = None
        self.num_tokens += entry.num_tokens

    def remove(self, entry: QueueEntry[T]) -> None:
        del self.entries[entry]
        self.num_tokens -= entry.num_tokens


class _Level(Generic[T]):
    """All entries of one priority."""

    def __init__(self) -> None:
        self.resumed = _Flow[T](0.0)
        self.flows: dict[str, _Flow[T]] = {}
        self.now = 0.0
        """The current virtual time."""

    @property
    def num_tokens(self) -> int:
        return self.resumed.num_tokens + sum(flow.num_tokens for flow in self.flows.values())

    @property
    def is_empty(self) -> bool:
        return not self.resumed.entries and not any(flow.entries for flow in self.flows.values())

    def flow_of(self, entry: QueueEntry[T]) -> _Flow[T]:
        return self.resumed if entry.goes_first else self.flows[entry.caller]

    def add(self, entry: QueueEntry[T]) -> None:
        if entry.goes_first:
            self.resumed.add(entry)
            return
        flow = self.flows.setdefault(entry.caller, _Flow(self.now))
        if not flow.entries:
            flow.begins_at = max(flow.begins_at, self.now)
        flow.add(entry)

    def charge(self, entry: QueueEntry[T]) -> None:
        if entry.goes_first:
            return  # the caller was charged when the request first began
        # A request that was taken back is charged again: its caller's charges may have been forgotten meanwhile.
        flow = self.flows[entry.caller]
        self.now = max(self.now, flow.begins_at)
        flow.begins_at += entry.num_tokens

    def forget_idle(self) -> None:
        """Forgets callers whose next request would begin at the same virtual time as a new caller's."""
        self.flows = {
            name: flow for name, flow in self.flows.items() if flow.entries or flow.begins_at > self.now
        }

    def in_order(self, skipped: Container[str]) -> Iterator[QueueEntry[T]]:
        yield from (entry for entry in self.resumed.entries if entry.caller not in skipped)
        flows = [flow for name, flow in self.flows.items() if flow.entries and name not in skipped]
        rests = [(flow.begins_at, iter(flow.entries)) for flow in flows]
        heap = [(begins_at, (first := next(rest)).number, first, rest) for begins_at, rest in rests]
        heapify(heap)
        while heap:
            begins_at, _, entry, rest = heap[0]
            if entry.caller in skipped:
                heappop(heap)
                continue
            yield entry
            following = next(rest, None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (begins_at + entry.num_tokens, following.number, following, rest))


class FairQueue(Generic[T]):
    """All waiting requests. Do not change the queue during an iteration."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._num_waiting = 0
        self._num_resumed = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_new(self) -> int:
        """Number of requests that never ran."""
        return self._num_waiting - self._num_resumed

    @property
    def callers(self) -> set[str]:
        """Callers whose requests wait for their turns."""
        flows = chain.from_iterable(level.flows.items() for level in self._levels.values())
        return {name for name, flow in flows if flow.entries}

    def first_ones_of(self, callers: Iterable[str]) -> Iterator[QueueEntry[T]]:
        """The first request of each of these callers, at each priority."""
        for level in self._levels.values():
            for name in callers:
                if (flow := level.flows.get(name)) is not None and flow.entries:
                    yield next(iter(flow.entries))

    def __contains__(self, entry: QueueEntry[T]) -> bool:
        level = self._levels.get(entry.priority)
        if level is None or (not entry.goes_first and entry.caller not in level.flows):
            return False
        return entry in level.flow_of(entry).entries

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        return self.without(())

    def without(self, skipped: Container[str]) -> Iterator[QueueEntry[T]]:
        """Yields entries in order, without those of `skipped` callers. `skipped` may grow meanwhile."""
        for priority in sorted(self._levels):
            yield from self._levels[priority].in_order(skipped)

    def add(self, entry: QueueEntry[T]) -> None:
        self._levels.setdefault(entry.priority, _Level()).add(entry)
        self._num_waiting += 1
        self._num_resumed += entry.is_resumed

    def remove(self, entry: QueueEntry[T]) -> None:
        """Removes an entry without serving it."""
        level = self._levels[entry.priority]
        level.flow_of(entry).remove(entry)
        self._num_waiting -= 1
        self._num_resumed -= entry.is_resumed
        if level.is_empty:
            del self._levels[entry.priority]
        elif not entry.goes_first and not level.flows[entry.caller].entries:
            level.forget_idle()

    def serve(self, entry: QueueEntry[T]) -> None:
        """Removes an entry that was placed, whether or not it was the first, and charges its caller."""
        self._levels[entry.priority].charge(entry)
        self.remove(entry)

    def num_tokens_before(self, entry: QueueEntry[T]) -> int:
        """About how many tokens are served before this entry, which was added last. The number is never much
        too high."""
        more_urgent = sum(
            level.num_tokens for priority, level in self._levels.items() if priority < entry.priority
        )
        level = self._levels[entry.priority]
        own = level.flow_of(entry)
        if entry.goes_first:
            return more_urgent + own.num_tokens - entry.num_tokens
        own_tokens = own.num_tokens - entry.num_tokens
        begins_at = own.begins_at + own_tokens
        others = (flow for flow in level.flows.values() if flow is not own)
        share = sum(min(flow.num_tokens, max(0, int(begins_at - flow.begins_at))) for flow in others)
        return more_urgent + level.resumed.num_tokens + own_tokens + share

    def last_of_largest(self) -> QueueEntry[T] | None:
        """The latest entry of the caller with the most entries, at the least urgent priority.

        Never an entry that ran before. If several callers have equally many entries, it is the latest of all their
        entries. None if every entry ran before.
        """
        for priority in sorted(self._levels, reverse=True):
            flows = [flow for flow in self._levels[priority].flows.values() if flow.entries]
            latest = [(len(flow.entries), next(reversed(flow.entries))) for flow in flows]
            if latest := [each for each in latest if not each[1].is_resumed]:
                return max(latest, key=lambda pair: (pair[0], pair[1].number))[1]
        return None
