"""QueueUnderTest: the gateway's queue before workers whose room a test chooses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import RequestError, WorkerUnavailable
from gateway.admission.fair_queue import QueueEntry
from gateway.admission.queue import RequestQueue
from gateway.admission.shares import OverShare
from gateway.routing.placement import NoRoom


@dataclass(eq=False)
class Request:
    name: str
    size: int = 1
    priority: int = 0
    is_resumed: bool = False
    was_taken_back: bool = False
    refusal: RequestError | None = None
    """Why it gets no place, whatever room there is."""
    has_worker: bool = True
    caller: str = "a caller"
    num_tokens: int = 10
    deadline: float | None = None
    """When the request must begin at the latest."""


OVER_SHARE = OverShare("its caller holds its share")


class QueueUnderTest:
    """A queue before workers with limited room; records which requests were tried."""

    def __init__(self, room: int = 0, max_queued: int = 10_000) -> None:
        self.room = room
        self.asked: list[str] = []
        self.placed: list[str] = []
        self.refused_ones: dict[str, RequestError] = {}
        self.over_share: set[str] = set()
        """Callers that hold their share of the places."""
        self.waiting = RequestQueue[Request](max_queued, self.place, 30.0, self._find_over_share)

    def join(
        self, request: Request, now: float, *, ends_at: float | None = None, patience_s: float = math.inf
    ) -> QueueEntry[Request] | None:
        """The request's entry if it waits; None if it was placed. Raises the error if it was refused itself."""
        entry = QueueEntry(
            item=request,
            caller=request.caller,
            num_tokens=request.num_tokens,
            priority=request.priority,
            is_resumed=request.is_resumed or request.was_taken_back,
            was_taken_back=request.was_taken_back,
            needs=lambda: request.has_worker,
            begin_by=request.deadline,
            deadline=ends_at,
            patience_s=patience_s,
        )
        if refusal := self.waiting.join(entry, now):
            refused, error = refusal
            assert refused not in self.waiting._queue
            if refused is entry:
                raise error
            self.refused_ones[refused.item.name] = error
        return entry if entry in self.waiting._queue else None

    def place(self, entry: QueueEntry[Request]) -> RequestError | None:
        request = entry.item
        self.asked.append(request.name)
        if not request.has_worker:
            return WorkerUnavailable("no such worker")
        if request.refusal is not None:
            return request.refusal
        if request.size > self.room:
            return NoRoom(f"{request.size} do not fit")
        self.room -= request.size
        self.placed.append(request.name)
        return None

    def make_room(self, size: int, now: float = 0.0) -> None:
        self.room += size
        self.asked.clear()
        self.waiting.sweep(now)

    def _find_over_share(self, callers: Iterable[str], _now: float) -> set[str]:
        return self.over_share.intersection(callers)
