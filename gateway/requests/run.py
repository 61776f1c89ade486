"""Run: a client's request from its arrival at the gateway to its end, with all that the dispatcher knows of it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.sampling import SamplingParams
from gateway.auth.callers import ANYBODY, Caller
from gateway.requests.attempt import Attempt, AttemptFailed
from gateway.requests.client_request import ClientRequest, Finish
from gateway.requests.journey import Journey
from gateway.requests.latency_window import StreamLatency
from gateway.requests.record import Outcome, RequestRecord, SeenAttempt
from gateway.requests.trace_context import TraceContext
from gateway.requests.unread import Unread
from gateway.routing.cost import EXPECTED_NEW_TOKENS
from gateway.routing.placement import Mode, Placement
from gateway.text import TextStream

MAX_SEEN_ATTEMPTS = 32
"""Refusals do not count against a request, so there may be any number of attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A validated, tokenised request of a client."""

    request_id: str
    call_id: str | None = None
    """What its client calls several answers together, of which this is one; None if it is the first, or alone."""
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    text: TextStream
    priority: int = 0
    cache_salt: str | None = None
    mode: Mode | None = None
    timeout_s: float | None = None
    """What its client waits from now on, whatever it took to get here."""
    caller: Caller = ANYBODY
    door: str = "grpc"
    """Through which it came, for those who count."""
    trace: TraceContext | None = None
    """Which one of its client's it belongs to."""
    is_chat: bool = False
    """Its prompt is a conversation."""
    intake_s: float = 0.0
    """What it took to get here from the client's request: tokenising, above all."""
    on_placed: Callable[[Placement], None] | None = None
    """Told of each attempt as it is sent to its workers; must not raise."""


@dataclass(slots=True, eq=False)
class Run:
    """A client's request from its arrival to its end."""

    generation: Generation
    request: ClientRequest
    journey: Journey
    latency: StreamLatency
    unread: Unread
    """Of its answer. Fails with AttemptFailed if there may be another attempt, else with a RequestError."""
    attempt: Attempt | None = None
    """While it is with workers."""
    placed: "asyncio.Future[Attempt | None] | None" = None
    """While it waits; None if it is not to be."""
    least_prefill_s: float = 0.0
    """What its prompt takes at least, as of when it came, if it has a deadline."""
    is_aborted: bool = False
    """Somebody else than the caller ended it."""
    finish: Finish | None = None
    """Once it has its answer."""
    attempts: deque[SeenAttempt] = field(default_factory=lambda: deque(maxlen=MAX_SEEN_ATTEMPTS))
    """For its record."""

    def note_attempt(self, attempt: Attempt, now: float) -> None:
        """It begins."""
        self.attempts.append(
            SeenAttempt(
                engine_request_id=attempt.engine_request_id,
                number=self.request.num_attempts - 1,
                placement=attempt.placement,
                began_at=now,
            )
        )

    def note_attempt_end(self, now: float) -> None:
        """The latest is over; what failed it may be told afterwards."""
        self.attempts.append(replace(self.attempts.pop(), ended_at=now))

    def note_attempt_failure(self, failure: AttemptFailed) -> None:
        self.attempts.append(replace(self.attempts.pop(), failure=failure))

    @property
    def priority(self) -> int:
        return self.generation.priority

    @property
    def is_resumed(self) -> bool:
        return self.request.num_attempts > 0

    @property
    def caller(self) -> str:
        return self.generation.caller.name

    @property
    def num_tokens(self) -> int:
        """What it is likely to cost, whatever room for an answer it asks for."""
        num_new_tokens = min(self.generation.sampling_params.max_tokens, EXPECTED_NEW_TOKENS)
        return len(self.generation.prompt_token_ids) + num_new_tokens

    def needs(self) -> object:
        return self.journey.needs()

    def time_left(self, now: float) -> float | None:
        generation = self.generation
        if generation.timeout_s is None:
            return None
        return max(0.0, generation.timeout_s - (now - self.request.arrived_at - generation.intake_s))

    def time_to_begin(self, now: float) -> float | None:
        """Until it would be too late for its first token to come before its deadline, if it has one."""
        left_s = self.time_left(now)
        return None if left_s is None else max(0.0, left_s - self.least_prefill_s)


def record_of(
    generation: Generation,
    run: Run | None,
    outcome: Outcome,
    error: BaseException | None,
    arrived_at: float,
    ended_at: float,
) -> RequestRecord:
    """`run` is None if it was not even admitted."""
    return RequestRecord(
        request_id=generation.request_id,
        caller=generation.caller,
        door=generation.door,
        trace=generation.trace,
        is_chat=generation.is_chat,
        outcome=outcome,
        error=error,
        arrived_at=run.request.arrived_at if run else arrived_at,  # what all its times count from
        ended_at=ended_at,
        num_prompt_tokens=len(generation.prompt_token_ids),
        num_output_tokens=run.request.num_output_tokens if run else 0,
        num_attempts=run.request.num_attempts if run else 0,
        path=run.request.path if run and run.finish else None,
        finish=run.finish if run else None,
        ttft_parts=run.request.ttft_parts if run else None,
        intake_s=generation.intake_s,
        attempts=tuple(run.attempts) if run else (),
        transfers=run.request.transfers if run else (),
    )
