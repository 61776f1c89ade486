"""The waiting queue, in one order or another; knows what comes first and nothing else."""

import heapq
from collections import deque
from typing import Protocol

from scheduler.request import Request


class WaitingQueue(Protocol):
    """Who waits, and who is next. Truthy while somebody waits."""

    def add(self, request: Request) -> None: ...

    def prepend(self, request: Request) -> None:
        """Puts a request back that had its turn already: a victim of preemption, or one that was skipped."""
        ...

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it stands; it must be there. O(n), for aborts."""
        ...

    def __len__(self) -> int: ...


class FCFSQueue:
    """First come, first served; whoever is put back goes first."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest (priority, arrival_time, request_id) first; putting back changes nothing about the order."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival_time, request.request_id, request))

    def prepend(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][3]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[3]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def make_queue(policy: str) -> WaitingQueue:
    """The queue of `SchedulerConfig.policy`."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
