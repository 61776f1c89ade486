"""One client's request and its answer as values: GatewayRequest, Delta and Finish."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.request import FinishReason, TokenLogprobs
from baton.sampling import SamplingParams
from gateway.auth.callers import ANYBODY, Caller
from gateway.call_ids import TraceContext
from gateway.conversation import AnswerParser
from gateway.requests.timing import Timing
from gateway.routing.placement import BlockHashes, Mode, Placement
from gateway.text import TextStream


def no_parser() -> AnswerParser | None:
    """For prompts that are no conversation."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """A client's validated, tokenised request. No two are equal: each has an answer of its own."""

    request_id: str
    call_id: str | None = None
    """The client's id for a call with several answers, of which this is a later one; None for the first or only one."""
    prompt_token_ids: tuple[int, ...]
    repeats_prompt: bool = False
    """Another request of the same call has this prompt, and counts its tokens."""
    sampling_params: SamplingParams
    text: TextStream
    """Turns the answer into text; still empty."""
    new_parser: Callable[[], AnswerParser | None] = no_parser
    """Makes what turns the answer's text into its events; None: all of it is text."""
    priority: int = 0
    cache_salt: str | None = None
    block_hashes: BlockHashes = field(default_factory=dict)
    """Of its prompt alone, as far as the router has needed them; answers to the same prompt share them."""
    skip_reading_prefix_cache: bool = False
    """No worker takes any of it from its prefix cache."""
    affinity_key: str | None = None
    """Requests with equal keys share prefixes: the router prefers the same workers for them."""
    mode: Mode | None = None
    timeout_s: float | None = None
    """How long the client waits, from the submission on; None: without limit."""
    caller: Caller = ANYBODY
    api: str = "grpc"
    """The API that the client used: `grpc`, `chat`, `completions`, ..."""
    trace: TraceContext | None = None
    """The client's trace context."""
    is_chat: bool = False
    """The prompt is a conversation."""
    preprocess_s: float = 0.0
    """How long preprocessing took, from the request's arrival; mostly tokenising."""
    on_placed: Callable[[Placement], None] | None = None
    """Called with each attempt's placement; must not raise."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a complete answer: why it ended, and what it took."""

    reason: FinishReason
    matched_stop: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    timing: Timing
    placement: Placement
    num_attempts: int
    num_draft_tokens: int = 0
    """Drafts that workers verified for this answer, in all its attempts."""
    num_accepted_draft_tokens: int = 0
    """Those of them that were right."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. The last one has `finish`."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None

    def without_reasons(self) -> "Delta":
        """For clients without the right to administer: workers' reasons may name machines and files."""
        if self.finish is None or not self.finish.timing.transfers:
            return self
        timing = self.finish.timing
        transfers = tuple(replace(seen, record=replace(seen.record, reason="")) for seen in timing.transfers)
        return replace(self, finish=replace(self.finish, timing=replace(timing, transfers=transfers)))
