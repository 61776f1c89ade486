"""RequestQueue: requests that no worker has room for at present, in fair order and with their deadlines; pure.

gateway/admission/fair_queue.py defines the order: priority, then requests that ran before, then callers in
turn. When workers may have room, `sweep` tries to place the first requests. Later requests that fit may pass
a request that does not fit yet. So a long prompt that waits for blocks does not delay short prompts.
Two limits apply:

    LOOK_AHEAD  a sweep ends after this many requests that do not fit, which limits the cost of the sweep
    MAX_PASSED  once this many requests have passed a request, no more may pass it, so that it gets enough room

Two kinds of requests never delay other requests: requests that no available worker can run, and requests of a caller
that holds its share (gateway/admission/shares.py). A sweep skips this caller's later requests.

A refusal contains the time after which the client should try again. See docs/admission.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from typing import Generic, TypeVar

from baton.errors import Overloaded, RequestError, WorkerUnavailable
from baton.system.standstill import Standstill, pace_of
from gateway.admission.fair_queue import FairQueue, QueueEntry
from gateway.admission.queue_rate import QueueRate
from gateway.admission.shares import HeldBack, OverShare
from gateway.routing.placement import AwaitsPrompts, NoDecodeWorker, NoPrefillWorker, NoRoom, NoSlot

LOOK_AHEAD = 8
MAX_PASSED = 64

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

ROUNDING_S = 1e-6
"""Tolerance for rounding errors, so that a tick at a deadline finds the entries that are due."""

MIN_REST_S = 1.0
"""When a request may wait beyond its patience, the queue checks it again after at least this time."""

CHECKS_PER_PACE = 2
"""How often the queue reads the clock within one pace of Standstill. So a timer that is late by half a pace does not
count as a standstill."""

T = TypeVar("T")

Refusal = tuple[QueueEntry[T], RequestError]


class RequestQueue(Generic[T]):
    """The waiting requests. `try_to_place` sends a request to its workers and returns None, or returns why
    it cannot: NoRoom, or another error if no available worker can run the request."""

    def __init__(
        self,
        max_queued: int,
        try_to_place: Callable[[QueueEntry[T]], RequestError | None],
        patience_s: float,
        over_share: Callable[[Iterable[str], float], set[str]] = lambda _callers, _now: set(),
    ) -> None:
        """`patience_s`: how long a request may wait without moving up in the queue. `over_share`
        returns those callers whose requests `try_to_place` would all refuse with OverShare at this time. Each sweep
        calls it once, since a thousand callers may wait."""
        self._max_queued = max_queued
        self._try_to_place = try_to_place
        self._find_over_share = over_share
        self._queue = FairQueue[T]()
        self._rate = QueueRate()
        self._advanced_to = -math.inf
        self._has_any_waited = False
        """Whether requests waited until the present moment. Requests that joined at this moment do not count."""
        self._num_joined = 0
        self._num_sweeps = 0
        self._num_placed = 0
        self._is_swept = True
        """False if a request that ran before has joined since the latest sweep."""
        self._is_any_hopeless = False
        """Whether the latest sweep that reached the end of the queue, or a later sweep, found requests that no worker
        can run. They do not delay other requests."""
        self._over_share: set[str] = set()
        """Callers that held their shares at the latest sweep, including callers that it did not reach. Their requests
        do not delay other requests."""
        self._patience_s = patience_s
        self._pace_s = pace_of(patience_s)
        self._standstill = Standstill(self._pace_s)
        self._checked_at = 0.0
        self._deadlines: list[tuple[float, int, QueueEntry[T]]] = []
        """A heap of deadlines. It may contain entries that have left the queue."""
        self._patience_ends: list[tuple[float, int, QueueEntry[T]]] = []
        """A heap of the times at which patience ends, without standstills of this process. It may contain entries that
        have left the queue."""

    def __len__(self) -> int:
        return len(self._queue)

    def oldest_since(self, *, for_worker: bool = False) -> float | None:
        """When the oldest waiting request joined. `for_worker`: a request counts only if the latest sweep tried it, and
        found no decode worker with room for it."""
        entries = (e for e in self._queue if not for_worker or _waits_for_decode_worker(self._reason(e)))
        return min((entry.since for entry in entries), default=None)

    def oldest_without_prefill_since(self) -> float | None:
        """When the oldest request joined that requires a prefill worker, and found none at the latest sweep."""
        entries = (entry for entry in self._queue if isinstance(self._reason(entry), NoPrefillWorker))
        return min((entry.since for entry in entries), default=None)

    def _reason(self, entry: QueueEntry[T]) -> RequestError | None:
        """Why the latest sweep did not place the request; None if this sweep did not try the request."""
        return entry.reason if entry.tried_in == self._num_sweeps else None

    def join(self, entry: QueueEntry[T], now: float) -> Refusal[T] | None:
        """Places the request if it fits, and a sweep reaches it. Otherwise queues it, or refuses one request.

        The new request is refused if it would wait beyond its deadline. If the queue is full,
        `last_of_largest` is refused, which may be the new request. A request that ran before waits for the next
        sweep, since a lost worker returns many requests at once. It is never refused, and does not count towards the
        queue's limit. The number of such requests is limited by the number that may run.
        """
        self._advance(now)
        self._num_joined += 1
        entry.number, entry.since = self._num_joined, now
        self._queue.add(entry)
        if entry.is_resumed:
            self._is_swept = False
        elif not self._is_swept or self._is_in_sight(entry):
            self.sweep(now)  # otherwise nothing has changed for the requests before it
        if entry not in self._queue:
            return None
        refusal = None if entry.is_resumed else self._too_late(entry, now) or self._too_many(entry)
        if refusal is not None:
            self._queue.remove(refusal[0])
        if refusal is None or refusal[0] is not entry:
            if entry.deadline is not None:
                heappush(self._deadlines, (entry.deadline, entry.number, entry))
            self._begin_patience(entry, entry.patience_s, len(self._queue) - 1, now)
        return refusal

    def leave(self, entry: QueueEntry[T], now: float) -> None:
        """Removes the request. Does nothing if it is not in the queue."""
        if entry in self._queue:
            self._advance(now)
            self._queue.remove(entry)
            self._shorten_heaps()

    def sweep(self, now: float) -> None:
        """Places the requests that fit, in order. Call this when workers may have room."""
        self._advance(now)
        self._is_swept = True
        placed: list[QueueEntry[T]] = []
        try:
            self._place_first_ones(placed, now)
        finally:
            for entry in placed:
                self._queue.serve(entry)
                self._num_placed += 1
                if self._has_any_waited:
                    self._rate.placed(entry.num_tokens)
            self._shorten_heaps()

    def retry_after_s(self, entry: QueueEntry[T]) -> float:
        """How long a refused client should wait until it tries again: about as long as the request would have
        waited.
        """
        num_tokens = self._queue.num_tokens_before(entry) + entry.num_tokens
        return min(max(self._rate.likely_wait_s(num_tokens), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def past_deadline(self, now: float) -> list[QueueEntry[T]]:
        """Entries whose deadline has passed. They stay in the queue until they `leave`."""
        return list(self._expired(self._deadlines, now))

    def out_of_patience(self, now: float) -> list[QueueEntry[T]]:
        """Entries that found no worker within their patience. They stay in the queue until they `leave`.

        Five kinds of requests may wait longer. If a caller holds its share, its requests wait for the caller's
        other requests, not for workers. A request that was taken back may wait as long as workers for it exist.
        Otherwise it would be refused because of other callers. A request that has moved up keeps waiting, since the
        queue moves. A request keeps waiting if it, or a request before it, lacks only a slot: slots become free when
        long answers end. It stops waiting once more than MAX_PASSED requests have overtaken it. A request that
        waited for room, and then lost its workers, may wait for workers as long as a new request.
        """
        expired = set(self._expired(self._patience_ends, self._running(now)))
        out: list[QueueEntry[T]] = []
        lacks_slot = False
        for num_before, entry in enumerate(self._queue if expired else ()):
            lacks_slot = lacks_slot or isinstance(self._reason(entry), NoSlot)
            if entry not in expired:
                continue
            if self._holds_share(entry) or (entry.was_taken_back and entry.has_workers):
                self._begin_patience(entry, max(entry.patience_s, MIN_REST_S), num_before, now)
            elif self._has_moved_up(entry, num_before):
                self._begin_patience(entry, self._patience_s, num_before, now)
            elif lacks_slot and entry.has_workers and self._num_placed_since(entry) <= MAX_PASSED:
                self._watch_patience(entry, self._patience_s, now)
            elif (rest_s := self._patience_without_workers_s(entry, now)) > ROUNDING_S:
                self._watch_patience(entry, rest_s, now)
            else:
                out.append(entry)
        return out

    def _has_moved_up(self, entry: QueueEntry[T], num_before: int) -> bool:
        """Whether fewer entries are before it than when its patience began, since some went to workers."""
        return entry.has_workers and num_before < entry.num_before and self._num_placed_since(entry) > 0

    def _patience_without_workers_s(self, entry: QueueEntry[T], now: float) -> float:
        """How long the entry may still wait for a worker. Time in which it waited for room does not count."""
        return 0.0 if entry.has_workers else entry.lost_workers_at + self._patience_s - self._running(now)

    def _num_placed_since(self, entry: QueueEntry[T]) -> int:
        """How many entries went to workers since this one's patience began."""
        return self._num_placed - entry.num_placed_then

    def _holds_share(self, entry: QueueEntry[T]) -> bool:
        """Whether the entry's caller held its share at the latest sweep, or when the entry was last tried: a sweep may
        end before it reaches the caller's entries."""
        return entry.caller in self._over_share or isinstance(entry.reason, OverShare)

    def next_deadline(self) -> float | None:
        """When to call `past_deadline` and `out_of_patience` next; None while no request waits."""
        if not len(self._queue):
            return None
        # A long time between two readings of the clock counts as a standstill, so the readings need a fixed pace.
        times = [self._checked_at + self._pace_s / CHECKS_PER_PACE]
        if (first := self._first(self._deadlines)) is not None:
            times.append(first)
        if (first := self._first(self._patience_ends)) is not None:
            times.append(first + self._standstill.total_s)
        return min(times)

    def _place_first_ones(self, placed: list[QueueEntry[T]], now: float) -> None:
        held_up: list[QueueEntry[T]] = []
        hopeless: dict[object, RequestError] = {}
        """Needs that no worker meets at present, with the reason."""
        self._over_share = self._find_over_share(self._queue.callers, now)
        for entry in self._queue.first_ones_of(self._over_share):
            if not isinstance(entry.reason, OverShare):  # this reason stays, even if a later sweep ends early
                self._note(entry, self._try_to_place(entry), now)
                if entry.reason is None:
                    placed.append(entry)
        self._num_sweeps += 1
        for entry in self._queue.without(self._over_share):
            entry.tried_in, needs = self._num_sweeps, entry.needs()
            if (reason := hopeless.get(needs)) is not None:
                self._note(entry, reason, now)
                continue
            self._note(entry, self._try_to_place(entry), now)
            if entry.reason is None:
                placed.append(entry)
                for passed in held_up:
                    passed.num_passed += 1
            elif isinstance(entry.reason, OverShare):
                self._over_share.add(entry.caller)
            elif not isinstance(entry.reason, NoRoom):
                hopeless[needs] = entry.reason
                self._is_any_hopeless = True
            else:
                held_up.append(entry)
                if len(held_up) == LOOK_AHEAD or entry.num_passed >= MAX_PASSED:
                    return
        self._is_any_hopeless = bool(hopeless)

    def _note(self, entry: QueueEntry[T], reason: RequestError | None, now: float) -> None:
        had_workers, entry.reason = entry.has_workers, reason
        if had_workers and not entry.has_workers:
            entry.lost_workers_at = self._running(now)

    def _is_in_sight(self, entry: QueueEntry[T]) -> bool:
        """Whether a sweep could reach this entry: fewer than LOOK_AHEAD entries before it lack room."""
        if entry.caller in self._over_share:
            return False
        before = takewhile(lambda other: other is not entry, self._queue.without(self._over_share))
        held_up = (other for other in before if other.reason is None or isinstance(other.reason, NoRoom))
        return len(list(islice(held_up, LOOK_AHEAD))) < LOOK_AHEAD

    def _too_late(self, entry: QueueEntry[T], now: float) -> Refusal[T] | None:
        """Refuses a request that would start too late even if the queue moved much faster than lately, and no other
        request passed this one."""
        if entry.begin_by is None or self._is_any_hopeless or self._over_share:
            return None
        left_s = max(0.0, entry.begin_by - now)
        wait_s = self._rate.least_wait_s(self._queue.num_tokens_before(entry))
        if wait_s <= left_s:
            return None
        message = (
            f"the request would start in {wait_s:.1f} s at the earliest, but to meet its deadline it must start "
            f"within {left_s:.1f} s; {len(self._queue) - 1} requests wait already"
        )
        return entry, Overloaded(message, self.retry_after_s(entry))

    def _too_many(self, entry: QueueEntry[T]) -> Refusal[T] | None:
        if self._queue.num_new <= self._max_queued:
            return None
        last = self._queue.last_of_largest()
        assert last is not None, "the new entry is one of them"
        num_others = len(self._queue) - 1
        if last is not entry:
            message = (
                f"{num_others} requests wait, and a new request is more urgent, or its caller has fewer waiting "
                "requests"
            )
            return last, Overloaded(message, self.retry_after_s(last))
        if isinstance(entry.reason, WorkerUnavailable):
            return entry, WorkerUnavailable(str(entry.reason))
        why = f": {entry.reason}" if entry.reason else ""
        return entry, Overloaded(f"{num_others} requests wait already{why}", self.retry_after_s(entry))

    def _begin_patience(self, entry: QueueEntry[T], patience_s: float, num_before: int, now: float) -> None:
        """The patience begins now, with `num_before` entries before this one."""
        entry.num_before, entry.num_placed_then = num_before, self._num_placed
        entry.lost_workers_at = -math.inf
        self._watch_patience(entry, patience_s, now)

    def _watch_patience(self, entry: QueueEntry[T], patience_s: float, now: float) -> None:
        if patience_s < math.inf:
            heappush(self._patience_ends, (self._running(now) + patience_s, entry.number, entry))

    def _expired(self, heap: list[tuple[float, int, QueueEntry[T]]], now: float) -> Iterator[QueueEntry[T]]:
        while (first := self._first(heap)) is not None and first <= now + ROUNDING_S:
            yield heappop(heap)[2]

    def _first(self, heap: list[tuple[float, int, QueueEntry[T]]]) -> float | None:
        while heap and heap[0][2] not in self._queue:
            heappop(heap)
        return heap[0][0] if heap else None

    def _shorten_heaps(self) -> None:
        """Removes from the heaps most entries that have left the queue; all of them once the queue is empty."""
        for heap in (self._deadlines, self._patience_ends):
            if not len(self._queue):
                heap.clear()
            elif len(heap) > 2 * len(self._queue) + 64:
                heap[:] = [each for each in heap if each[2] in self._queue]
                heapify(heap)

    def _running(self, now: float) -> float:
        self._checked_at = now
        return self._standstill.running(now)

    def _advance(self, now: float) -> None:
        if now > self._advanced_to:
            self._advanced_to, self._has_any_waited = now, len(self._queue) > 0
        self._rate.advance(now, is_queue=len(self._queue) > 0)


def _waits_for_decode_worker(reason: RequestError | None) -> bool:
    """Whether a request waits for a decode worker with room, not for its turn or for prefill workers."""
    return isinstance(reason, NoRoom | NoDecodeWorker) and not isinstance(reason, HeldBack | AwaitsPrompts)
