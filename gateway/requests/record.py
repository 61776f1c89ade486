"""RequestRecord: what became of one request, reported once at its end; and Tally, what became of all of them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from baton.errors import RequestAborted
from gateway.auth.callers import Caller
from gateway.call_ids import TraceContext
from gateway.requests.attempt import Attempt, Cause
from gateway.requests.request import Finish
from gateway.requests.request_state import RequestState
from gateway.requests.timing import SeenTransfer, TtftParts

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
class RequestRecord:
    """One request, from its arrival to its end. Holds neither prompt nor answer."""

    request_id: str
    caller: Caller
    api: str
    """The frontend that it came by: `grpc`, `chat`, `completions`, ..."""
    is_chat: bool
    """Its prompt was a conversation."""
    trace: TraceContext | None
    """The trace of its client's that it belongs to."""
    outcome: Outcome
    error: BaseException | None
    """Of a request that did not finish."""
    arrived_at: float
    """On the gateway's clock, like all times of one process; `finish.timing` counts from there."""
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
    """From its arrival until it had tokens, and joined the queue."""
    attempts: tuple[Attempt, ...] = ()
    """The latest of them, and all unless there were very many. They have ended and do not change any more."""
    transfers: tuple[SeenTransfer, ...] = ()
    """Hand-overs, those of failed attempts too, counted from the arrival."""

    @property
    def error_kind(self) -> str | None:
        """What ended it, to count and search for: a class of baton/errors.py, CLIENT_LEFT, or the type of an
        unexpected error. None if it finished."""
        if self.error is None:
            return None
        return type(self.error).__name__ if isinstance(self.error, Exception) else CLIENT_LEFT

    @property
    def ttft_s(self) -> float | None:
        """None if there was no token."""
        parts = self.ttft_parts
        return None if parts is None else sum(getattr(parts, part.name) for part in fields(parts))


OnEnd = Callable[[RequestRecord], None]


def record_of(
    state: RequestState, outcome: Outcome, error: BaseException | None, ended_at: float
) -> RequestRecord:
    request, is_finished = state.request, outcome is Outcome.FINISHED
    return RequestRecord(
        request_id=request.request_id,
        caller=request.caller,
        api=request.api,
        trace=request.trace,
        is_chat=request.is_chat,
        outcome=outcome,
        error=error,
        arrived_at=state.arrived_at,
        ended_at=ended_at,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=state.num_output_tokens,
        num_attempts=state.num_attempts,
        path=state.path if is_finished else None,
        finish=state.finish if is_finished else None,
        ttft_parts=state.times.ttft_parts,
        intake_s=request.intake_s,
        attempts=tuple(state.attempts),
        transfers=state.times.transfers,
    )


OUTCOMES = ("received", *(outcome.value for outcome in Outcome))


class Tally:
    """received = finished + failed + rejected + aborted + those that wait + those that run, at every moment.

    `rejected` never had a worker; `failed` had one; `aborted` were ended by their clients, by name or by leaving, or
    by their deadline.
    """

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter(disaggregated=0, local=0, fallback=0)
        """Finished requests by the path they really took."""
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._counts.update({f"migrated_{cause.value}": 0 for cause in Cause})

    def received(self) -> None:
        self._counts["received"] += 1

    def finished(self, path: str, reason: str) -> None:
        """Which way its answer came, and why, if there is more to say."""
        self.paths[path] += 1
        self._counts["finished"] += 1
        if reason:
            self._counts[f"finished_{path}: {reason}"] += 1

    def ended(self, error: BaseException, *, was_placed: bool) -> Outcome:
        """It came to an end without an answer."""
        if not isinstance(error, Exception) or isinstance(error, RequestAborted):
            outcome = Outcome.ABORTED
        else:
            outcome = Outcome.FAILED if was_placed else Outcome.REJECTED
        self._counts[outcome.value] += 1
        return outcome

    def migrated(self, cause: Cause) -> None:
        """An attempt ended so, and the request goes on with another one."""
        self._counts[f"migrated_{cause.value}"] += 1

    @property
    def counters(self) -> dict[str, int]:
        """Monotonic, for metrics and tests."""
        return dict(self._counts)
