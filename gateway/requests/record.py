"""RequestRecord: one request's outcome, reported once at its end; and Tally, the counts of all outcomes."""

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
from gateway.timing.request_times import SeenTransfer, TtftParts

CLIENT_LEFT = "ClientLeft"

CLIENTS_CHOICES = (CLIENT_LEFT, RequestAborted.__name__)
"""Kinds of errors that a client itself caused by ending its request. They are no failures."""


class Outcome(Enum):
    """How a request ended; Tally explains the values."""

    FINISHED = "finished"
    FAILED = "failed"
    REJECTED = "rejected"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from its arrival to its end. Contains neither the prompt nor the answer."""

    request_id: str
    caller: Caller
    api: str
    """The API that the client used: `grpc`, `chat`, `completions`, ..."""
    is_chat: bool
    """The prompt was a conversation."""
    trace: TraceContext | None
    """The client's trace context."""
    outcome: Outcome
    error: BaseException | None
    """None if the request finished."""
    arrived_at: float
    """When the request arrived, on the gateway's clock. The times in `finish.timing` count from this time."""
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_attempts: int
    path: str | None
    """The path that a finished request really took: `disaggregated`, `local` or `fallback`."""
    finish: Finish | None
    ttft_parts: TtftParts | None
    """The parts of the time to first token; None if there was no token."""
    preprocess_s: float = 0.0
    """How long preprocessing took, from the arrival until the request joined the queue."""
    attempts: tuple[Attempt, ...] = ()
    """The latest MAX_RECORDED_ATTEMPTS attempts. They do not change any more."""
    transfers: tuple[SeenTransfer, ...] = ()
    """All hand-overs, including those of failed attempts. Times count from the request's arrival."""

    @property
    def error_kind(self) -> str | None:
        """The kind of error: a class of baton/errors.py, CLIENT_LEFT, or the type of an unexpected error.
        None if the request finished."""
        if self.error is None:
            return None
        return type(self.error).__name__ if isinstance(self.error, Exception) else CLIENT_LEFT

    @property
    def ttft_s(self) -> float | None:
        """The time to first token; None if there was no token."""
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
        preprocess_s=request.preprocess_s,
        attempts=tuple(state.attempts),
        transfers=state.times.transfers,
    )


OUTCOMES = ("received", *(outcome.value for outcome in Outcome))


class Tally:
    """received = finished + failed + rejected + aborted + waiting + running, at every moment.

    A `rejected` request was never placed on workers. A `failed` request was placed. An `aborted` request was ended
    through its id, by its client's disconnect, by its deadline, or because its client read too slowly.
    """

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter(disaggregated=0, local=0, fallback=0)
        """Numbers of finished requests, by the path that they really took."""
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._counts.update({f"migrated_{cause.value}": 0 for cause in Cause})

    def received(self) -> None:
        self._counts["received"] += 1

    def finished(self, path: str, reason: str) -> None:
        """A request finished on this path. `reason` is the router's reason, which may be empty."""
        self.paths[path] += 1
        self._counts["finished"] += 1
        if reason:
            self._counts[f"finished_{path}: {reason}"] += 1

    def ended(self, error: BaseException, *, was_placed: bool) -> Outcome:
        """A request ended without a complete answer."""
        if not isinstance(error, Exception) or isinstance(error, RequestAborted):
            outcome = Outcome.ABORTED
        else:
            outcome = Outcome.FAILED if was_placed else Outcome.REJECTED
        self._counts[outcome.value] += 1
        return outcome

    def migrated(self, cause: Cause) -> None:
        """The request gets another attempt: the last one ended for this cause, which may be a refusal. The metric
        calls every further attempt a migration."""
        self._counts[f"migrated_{cause.value}"] += 1

    @property
    def counters(self) -> dict[str, int]:
        """All counts, for metrics and tests. They only grow."""
        return dict(self._counts)
