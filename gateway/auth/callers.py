"""Caller: on whose behalf a call is made, and what it may ask for."""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

from baton.config import ANONYMOUS


class Right(Enum):
    """What a call needs, and an API key's scopes grant."""

    GENERATE = "generate"
    """Send requests."""
    OBSERVE = "observe"
    """Metrics, and how the fleet stands, without addresses."""
    ADMINISTER = "administer"
    """Drain workers, change roles, restart them, and see addresses."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. Callers share a gateway fairly by name; who they are is proven at the door."""

    name: str
    may_administer: bool = False
    may_observe: bool = False
    may_generate: bool = True
    requests_per_minute: int | None = None
    """At this gateway; None: as many as it has room for."""
    max_concurrent: int | None = None
    """Likewise."""
    best_priority: int | None = None
    """What its requests may ask for, and what they get at best; None: whatever they ask for."""

    def may(self, right: Right) -> bool:
        match right:
            case Right.GENERATE:
                return self.may_generate
            case Right.OBSERVE:
                return self.may_observe or self.may_administer
            case Right.ADMINISTER:
                return self.may_administer


MAX_WATCH_S = 3600.0
"""A call that lasts for as long as its client likes ends then, and may be made again by whoever still may."""

ANYBODY = Caller(ANONYMOUS, may_administer=True, may_observe=True)
"""Everyone who can connect to a gateway on loopback that asks nobody for a key."""

NOBODY = Caller(ANONYMOUS, may_generate=False)
"""Whoever asks for what is open to everybody."""

current_caller: ContextVar[Caller] = ContextVar("current_caller")
"""Of the gRPC call that this task serves; the door sets it before the call begins."""
