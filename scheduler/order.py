"""Which waiting request runs first, and which running request is preempted first; knows no queue.

The two classes are the policies of `SchedulerConfig.policy`. A request's key says its place in the queue. A request
that leaves the queue for a while keeps its key, so it returns to its place. Only a request that had its turn may
get another key (`key_of_returning`).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from baton.config import SchedulerConfig
from scheduler.request import QueueKey, Request

MAX_FUTILE_PREEMPTIONS = 32
"""How often a request may lose its blocks without a new token in between; then `Priority.victims` spares it."""

LEAST_STEP_TOKENS = 16
"""A step with fewer tokens takes about as long as a step with this many."""


class Order(Protocol):
    """Gives each request a unique key; requests with lower keys run first."""

    def key_of_new(self, request: Request, num_cached_tokens: int = 0) -> QueueKey:
        """Key of a new request, of which the prefix cache has `num_cached_tokens` tokens."""
        ...

    def key_of_returning(self, request: Request) -> QueueKey:
        """Key of a request that had its turn already: a victim of preemption, or a request whose load failed."""
        ...

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """These running requests, in the order of preemption. Called only if blocks ran out, or for miniVLLM's rule."""
        ...

    def planned(self, num_tokens: int) -> None:
        """Notes that a step with `num_tokens` tokens was planned."""
        ...


class FCFS:
    """First come, first served. Returning requests run first; the youngest running request is preempted first.

    Prompts computed for other workers run in the order of their remaining work. So a short prompt need not
    wait behind a long one. Time is measured in computed tokens, and each step counts as LEAST_STEP_TOKENS at
    least.

    A prompt's key is the time at which the prompt would be done if it ran alone from its arrival on. A later prompt
    overtakes it only if the later prompt is shorter than the earlier one's remaining work. For this
    comparison, the time that the earlier prompt waits counts as if the prompt had been computed meanwhile. So a prompt
    of N tokens can be overtaken only by prompts that arrive before N more tokens are computed.

    A prompt for another worker keeps its key when it is preempted. With a lower key, it would run before the prompt
    that took its blocks, and take them back: two prompts could preempt each other for ever.
    """

    def __init__(self) -> None:
        self._num_computed_tokens = 0
        self._last_key = 0
        self._first_key = 0

    def key_of_new(self, request: Request, num_cached_tokens: int = 0) -> QueueKey:
        self._last_key += 1
        num_own_tokens = request.num_initial_tokens - num_cached_tokens if request.is_producer else 0
        return self._num_computed_tokens + num_own_tokens, self._last_key

    def key_of_returning(self, request: Request) -> QueueKey:
        if request.is_producer:
            return request.queue_key
        self._first_key -= 1
        return (self._first_key,)

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        return reversed(running)

    def planned(self, num_tokens: int) -> None:
        if num_tokens:
            self._num_computed_tokens += max(num_tokens, LEAST_STEP_TOKENS)


class Priority:
    """Runs the lowest (priority, arrival_time, request_id) first; preempts the highest (priority, arrival_time) first.

    A returning request has the same key as before. With ageing, every `ageing_s` seconds of waiting lower a
    request's priority value by 1. All waiting requests age at the same pace. So their order never changes,
    and the key needs no clock: priority + arrival_time / ageing_s. A request can be overtaken only by
    requests that arrive within `ageing_s` times the difference of their priorities.
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
        """Worst priority first. Among equals, the longest-running request is preempted first, as in vLLM V1.

        An exception prevents equals from preempting one another without progress. Requests that lost their blocks
        repeatedly, without a new token in between, are spared while other equals remain. If only such requests remain,
        the one with the highest id is preempted first. So at least the request with the lowest id makes progress.
        """
        usual = [request for request in running if request.num_futile_preemptions < MAX_FUTILE_PREEMPTIONS]
        if len(usual) < len(running):
            spared = [
                request for request in running if request.num_futile_preemptions >= MAX_FUTILE_PREEMPTIONS
            ]
            usual += sorted(spared, key=lambda request: request.request_id, reverse=True)
        # Equals stay in order.
        return iter(sorted(usual, key=lambda request: request.queue_key[:-1], reverse=True))

    def planned(self, num_tokens: int) -> None:
        """Does nothing: only priorities and arrival times decide."""


def make_order(config: SchedulerConfig) -> Order:
    return Priority(config.priority_ageing_s) if config.policy == "priority" else FCFS()
