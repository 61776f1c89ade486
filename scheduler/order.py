"""Who comes first among those that wait, and who gives way first among those that run; knows neither queue.

The two policies of `SchedulerConfig.policy`. A place in the queue is a key that a request gets once, so a request that
is set aside for a while comes back to where it stood.
"""

from collections.abc import Sequence
from typing import Protocol

from baton.config import SchedulerConfig
from scheduler.request import QueueKey, Request

MAX_FUTILE_PREEMPTIONS = 32
"""Times that a request may lose its blocks without having sampled a token in between, before it is spared."""


class Order(Protocol):
    """Lower keys are served first; no two requests share one."""

    def key_of_new(self, request: Request) -> QueueKey: ...

    def key_of_returning(self, request: Request) -> QueueKey:
        """For a request that had its turn already: a victim of preemption, or one whose load failed."""
        ...

    def victim_index(self, running: Sequence[Request]) -> int:
        """Who loses its blocks next; `running` is not empty."""
        ...


class FCFS:
    """First come, first served; whoever returns goes first, and the youngest gives way."""

    def __init__(self) -> None:
        self._last_key = 0
        self._first_key = 0

    def key_of_new(self, _request: Request) -> QueueKey:
        self._last_key += 1
        return (self._last_key,)

    def key_of_returning(self, _request: Request) -> QueueKey:
        self._first_key -= 1
        return (self._first_key,)

    def victim_index(self, running: Sequence[Request]) -> int:
        return len(running) - 1


class Priority:
    """Lowest (priority, arrival_time, request_id) first, returning or not; highest (priority, arrival_time) gives way.

    With ageing, every `ageing_s` seconds of waiting are worth one step of priority. All that wait grow older at the
    same pace, so their order never changes with time and needs no clock: priority + arrival_time / ageing_s. Only those
    that arrive within `ageing_s` times the difference of their priorities can overtake a request.
    """

    def __init__(self, ageing_s: float = 0.0) -> None:
        self._ageing_s = ageing_s

    def key_of_new(self, request: Request) -> QueueKey:
        return (*self._rank(request), request.request_id)

    def key_of_returning(self, request: Request) -> QueueKey:
        return self.key_of_new(request)

    def victim_index(self, running: Sequence[Request]) -> int:
        """Of equals the one that runs longest, as in V1; unless equals preempt each other in turn and none gets on.

        Those who lost their blocks again and again without a token in between are spared; where all of the equals were,
        the last by id gives way, so that the first at least gets on.
        """
        ranks = [self._rank(request) for request in running]
        worst = max(ranks)
        equals = [index for index, rank in enumerate(ranks) if rank == worst]
        for index in equals:
            if running[index].num_futile_preemptions < MAX_FUTILE_PREEMPTIONS:
                return index
        return max(equals, key=lambda index: running[index].request_id)

    def _rank(self, request: Request) -> tuple[float, float]:
        if not self._ageing_s:
            return request.priority, request.arrival_time
        return request.priority + request.arrival_time / self._ageing_s, request.arrival_time


def make_order(config: SchedulerConfig) -> Order:
    return Priority(config.priority_ageing_s) if config.policy == "priority" else FCFS()
