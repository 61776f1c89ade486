"""RequestRecord: what became of one request, told once when it is over; for metrics, traces and logs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from baton.errors import RequestAborted
from gateway.auth.callers import Caller
from gateway.requests.attempt import AttemptFailed
from gateway.requests.client_request import Finish, SeenTransfer
from gateway.requests.trace_context import TraceContext
from gateway.requests.ttft import TtftParts
from gateway.routing.placement import Placement

CLIENT_LEFT = "ClientLeft"

CLIENTS_CHOICES = (CLIENT_LEFT, RequestAborted.__name__)
"""Kinds of errors with which nothing was wrong."""


class Outcome(Enum):
    """How it ended; see Tally for what they add up to."""

    FINISHED = "finished"
    FAILED = "failed"
    REJECTED = "rejected"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAttempt:
    """One try at a request, on the gateway's clock."""

    engine_request_id: str
    """By which its workers know it."""
    number: int
    """Counts from 0."""
    placement: Placement
    began_at: float
    ended_at: float | None = None
    """None while it is under way."""
    failure: AttemptFailed | None = None
    """Why it came to nothing, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from its arrival to its end. Holds neither prompt nor answer."""

    request_id: str
    caller: Caller
    door: str
    """Through which it came: `grpc`, `chat`, `completions`, ..."""
    is_chat: bool
    """Its prompt was a conversation."""
    trace: TraceContext | None
    """Which one of its client's it belongs to."""
    outcome: Outcome
    error: BaseException | None
    """Of a request that did not finish."""
    arrived_at: float
    """On the gateway's clock, like all times of one process; `timing` counts from there."""
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_attempts: int
    path: str | None
    """Which way it really took, if it finished: `disaggregated`, `local` or `fallback`."""
    finish: Finish | None
    ttft_parts: TtftParts | None
    """Where the time to its first token went; None if there was none."""
    intake_s: float = 0.0
    """From its arrival until it had tokens, and stood in line."""
    attempts: tuple[SeenAttempt, ...] = ()
    """The latest of them, and all unless it had very many."""
    transfers: tuple[SeenTransfer, ...] = ()
    """Hand-overs, those of failed attempts too, counted from the arrival."""

    @property
    def error_kind(self) -> str | None:
        """What ended it, for those who count and search: a class of baton/errors.py, CLIENT_LEFT, or, if that is a bug,
        whatever it is. None if it finished."""
        if self.error is None:
            return None
        return type(self.error).__name__ if isinstance(self.error, Exception) else CLIENT_LEFT

    @property
    def ttft_s(self) -> float | None:
        """None if there was no token."""
        parts = self.ttft_parts
        return None if parts is None else sum(getattr(parts, part.name) for part in fields(parts))


OnEnd = Callable[[RequestRecord], None]
