"""Which waiting request comes first, and which running request gives way first; knows neither queue.

The two policies of `SchedulerConfig.policy`. A request gets its place in the queue once, as a key. So a request that
is set aside for a while returns to its place.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from baton.config import SchedulerConfig
from scheduler.request import QueueKey, Request

MAX_FUTILE_PREEMPTIONS = 32
"""How often a request may lose its blocks without sampling a token in between, before it is spared."""

LEAST_STEP_TOKENS = 16
"""A step of fewer tokens takes about as long as one of these."""


class Order(Protocol):
    """Lower keys are served first; no two requests share one."""

    def key_of_new(self, request: Request, num_cached_tokens: int = 0) -> QueueKey:
        """`num_cached_tokens`: how much of it the prefix cache has."""
        ...

    def key_of_returning(self, request: Request) -> QueueKey:
        """Key of a request that had its turn already: a victim of preemption, or a request whose load failed."""
        ...

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """All running requests in the order of preemption; called once a step, and only if blocks ran out."""
        ...

    def planned(self, num_tokens: int) -> None:
        """A step of so many tokens was planned."""
        ...


class FCFS:
    """First come, first served; returning requests go first, and the youngest gives way.

    Prompts that are computed for other workers are served by remaining work, so that short ones need not wait behind
    long ones. The clock counts computed tokens, and a step as LEAST_STEP_TOKENS at least. A prompt's key is the time at
    which it would be done if it were alone from its arrival on: a later prompt overtakes it only if it is shorter than
    what is left of it. A prompt that waits comes nearer to its turn like one that is computed, so it is overtaken by
    prompts that arrive before as many tokens as its own were computed, and by no later ones.
    """

    def __init__(self) -> None:
        self._num_computed_tokens = 0
        self._last_key = 0
        self._first_key = 0

    def key_of_new(self, request: Request, num_cached_tokens: int = 0) -> QueueKey:
        self._last_key += 1
        num_own_tokens = request.num_initial_tokens - num_cached_tokens if request.is_producer else 0
        return self._num_computed_tokens + num_own_tokens, self._last_key

    def key_of_returning(self, _request: Request) -> QueueKey:
        self._first_key -= 1
        return (self._first_key,)

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        return reversed(running)

    def planned(self, num_tokens: int) -> None:
        if num_tokens:
            self._num_computed_tokens += max(num_tokens, LEAST_STEP_TOKENS)


class Priority:
    """Lowest (priority, arrival_time, request_id) first, returning or not; highest (priority, arrival_time) gives
    way.

    With ageing, every `ageing_s` seconds of waiting are worth one step of priority. All waiting requests age at the
    same pace. So their order never changes, and the key needs no clock: priority + arrival_time / ageing_s. Only
    requests that arrive within `ageing_s` times the difference of their priorities can overtake a request.
    """

    def __init__(self, ageing_s: float = 0.0) -> None:
        self._ageing_s = ageing_s

    def key_of_new(self, request: Request, _num_cached_tokens: int = 0) -> QueueKey:
        if not self._ageing_s:
            return request.priority, request.arrival_time, request.request_id
        aged = request.priority + request.arrival_time / self._ageing_s
        return aged, request.arrival_time, request.request_id

    def key_of_returning(self, request: Request) -> QueueKey:
        return self.key_of_new(request)

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """Among equals, the one that has run longest gives way first, as in V1, unless equals preempt one another
        without progress.

        Requests that lost their blocks repeatedly without a token in between are spared while other equals remain.
        After that, the last by id gives way, so that at least the first makes progress.
        """
        usual = [request for request in running if request.num_futile_preemptions < MAX_FUTILE_PREEMPTIONS]
        if len(usual) < len(running):
            spared = [
                request for request in running if request.num_futile_preemptions >= MAX_FUTILE_PREEMPTIONS
            ]
            usual += sorted(spared, key=lambda request: request.request_id, reverse=True)
        return iter(
            sorted(usual, key=lambda request: request.queue_key[:-1], reverse=True)
        )  # equals stay in order

    def planned(self, num_tokens: int) -> None:
        """Priorities and arrivals alone decide."""


def make_order(config: SchedulerConfig) -> Order:
    return Priority(config.priority_ageing_s) if config.policy == "priority" else FCFS()
