"""Run: a client's request from its arrival at the gateway to its end, with all that the dispatcher knows of it."""

import asyncio
from dataclasses import dataclass, field

from baton.request import RequestOutput
from baton.sampling import SamplingParams
from gateway.attempt import Attempt
from gateway.client_request import ClientRequest
from gateway.journey import Journey
from gateway.latency_window import StreamLatency
from gateway.routing.placement import Mode
from gateway.text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A validated, tokenised request of a client."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    text: TextStream
    priority: int = 0
    cache_salt: str | None = None
    mode: Mode | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that an attempt was placed on is gone."""

    engine_request_id: str
    """The attempt."""
    reason: str
    was_leaving: bool
    """It had been asked to, and said so."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Somebody else than the caller ended the request."""


Event = tuple[str, RequestOutput | Lost] | Aborted
"""Of whom, and what."""


@dataclass(slots=True, eq=False)
class Run:
    """A client's request from its arrival to its end."""

    generation: Generation
    request: ClientRequest
    journey: Journey
    latency: StreamLatency
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    attempt: Attempt | None = None
    """While it is with workers."""
    placed: "asyncio.Future[None] | None" = None
    """While it waits."""
    is_aborted: bool = False
    """Somebody else than the caller ended it."""
    is_finished: bool = False
    """It has its answer."""

    @property
    def priority(self) -> int:
        return self.generation.priority

    @property
    def is_resumed(self) -> bool:
        return self.request.num_attempts > 0

    def needs(self) -> object:
        return self.journey.needs()

    def time_left(self, now: float) -> float | None:
        timeout_s = self.generation.timeout_s
        return None if timeout_s is None else max(0.0, timeout_s - (now - self.request.arrived_at))
