"""One client's request and its answer, as values: what was asked, what the client gets, and how it ended."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.request import FinishReason, TokenLogprobs
from baton.sampling import SamplingParams
from gateway.auth.callers import ANYBODY, Caller
from gateway.call_ids import TraceContext
from gateway.requests.timing import Timing
from gateway.routing.placement import Mode, Placement
from gateway.text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """A validated, tokenised request of a client. Two are never equal: each has an answer of its own."""

    request_id: str
    call_id: str | None = None
    """What its client calls several answers together, of which this is one; None if it is the first, or alone."""
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    text: TextStream
    """Turns its answer into text; nothing was pushed into it yet."""
    priority: int = 0
    cache_salt: str | None = None
    mode: Mode | None = None
    timeout_s: float | None = None
    """How long its client waits, from now on."""
    caller: Caller = ANYBODY
    api: str = "grpc"
    """The frontend that it came by: `grpc`, `chat`, `completions`, ..."""
    trace: TraceContext | None = None
    """The trace of its client's that it belongs to."""
    is_chat: bool = False
    """Its prompt is a conversation."""
    intake_s: float = 0.0
    """The time from its arrival until now: tokenising, above all."""
    on_placed: Callable[[Placement], None] | None = None
    """Called with each attempt's placement; must not raise."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended well, and what it took."""

    reason: FinishReason
    matched_stop: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    timing: Timing
    placement: Placement
    num_attempts: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. The last one has `finish`."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None

    def without_reasons(self) -> "Delta":
        """For clients that do not administer: why a hand-over failed is in workers' words, which may name machines
        and files."""
        if self.finish is None or not self.finish.timing.transfers:
            return self
        timing = self.finish.timing
        transfers = tuple(replace(seen, record=replace(seen.record, reason="")) for seen in timing.transfers)
        return replace(self, finish=replace(self.finish, timing=replace(timing, transfers=transfers)))
