"""WaitingQueue: requests by their `queue_key`; does not know why they wait."""

import heapq
import itertools
from collections.abc import Iterator

from scheduler.request import QueueKey, Request

Entry = tuple[QueueKey, int, Request]
"""The request's key, the number of this entry, the request."""


class WaitingQueue:
    """A heap. `remove` works at any place: the entry becomes dead, and is skipped later. Each change is O(log n)."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[str, int] = {}
        """The number of each waiting request's entry; all other entries are dead."""
        self._numbers = itertools.count()

    def push(self, request: Request) -> None:
        """Puts a request at the place given by its key; it must not be queued yet."""
        assert request.request_id not in self._live, f"{request.request_id} is queued already"
        number = self._live[request.request_id] = next(self._numbers)
        heapq.heappush(self._heap, (request.queue_key, number, request))

    def peek(self) -> Request | None:
        """The first request."""
        self._skip_dead()
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        self._skip_dead()
        request = heapq.heappop(self._heap)[2]
        del self._live[request.request_id]
        return request

    def remove(self, request: Request) -> bool:
        """Removes a request from any place; False if it is not here."""
        if self._live.pop(request.request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._live) + 64:  # else dead entries could outnumber live ones
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def first_ids(self, limit: int) -> tuple[str, ...]:
        """Ids of the first requests, for people to read."""
        live = (entry for entry in self._heap if self._is_live(entry))
        return tuple(entry[2].request_id for entry in heapq.nsmallest(limit, live))

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (entry[2] for entry in self._heap if self._is_live(entry))

    def _skip_dead(self) -> None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_live(self, entry: Entry) -> bool:
        return self._live.get(entry[2].request_id) == entry[1]
