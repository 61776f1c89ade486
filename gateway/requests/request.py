"""One client's request and its answer as values: GatewayRequest, Delta and Finish."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.request import FinishReason, PackedLogprobs, TokenLogprobs
from baton.sampling import SamplingParams
from gateway.auth.callers import ANYBODY, Caller
from gateway.call_ids import TraceContext
from gateway.conversation import SPECIAL, AnswerEvent, AnswerParser, Text
from gateway.routing.placement import BlockHashes, Mode, Placement
from gateway.text import TextStream
from gateway.timing.request_times import Timing


def no_parser() -> AnswerParser | None:
    """The `new_parser` of prompts that are not conversations: their answers need no parser."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """A client's validated, tokenized request. No two are equal, since each has its own answer."""

    request_id: str
    call_id: str | None = None
    """If a call has several answers: the call's id, for all answers but the first. Else None."""
    prompt_token_ids: tuple[int, ...]
    repeats_prompt: bool = False
    """Another request of the same call has this prompt, and only that request counts the prompt's tokens."""
    sampling_params: SamplingParams
    text: TextStream
    """Turns the answer's tokens into text; empty at first."""
    new_parser: Callable[[], AnswerParser | None] = no_parser
    """Creates the parser that turns the answer's text into events. Returns None if all is text."""
    priority: int = 0
    cache_salt: str | None = None
    block_hashes: BlockHashes = field(default_factory=dict)
    """Hashes of the prompt's blocks that the router needed so far. Answers to the same prompt share them."""
    skip_reading_prefix_cache: bool = False
    """Workers do not use their prefix caches for this request."""
    affinity_key: str | None = None
    """Requests with equal keys share prefixes: the router prefers the same workers for them."""
    mode: Mode | None = None
    deadline: float | None = None
    """When the client stops waiting, on the clock of the gateway and its event loop; None: it waits without limit."""
    caller: Caller = ANYBODY
    api: str = "grpc"
    """The API that the client used: `grpc`, `chat`, `completions`, ..."""
    trace: TraceContext | None = None
    """The client's trace context."""
    is_chat: bool = False
    """The prompt is a conversation."""
    preprocess_s: float = 0.0
    """How long preprocessing took, from the request's arrival; mostly tokenizing."""
    on_placed: Callable[[Placement], None] | None = None
    """Called with each attempt's placement; must not raise."""

    @property
    def call(self) -> tuple[str, str]:
        """The caller's name, and the id of the call to which this request belongs."""
        return self.caller.name, self.call_id or self.request_id


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
    """Drafts that were accepted."""
    stop_reason: str | int | None = None
    """The client's stop string, or the token of its `stop_token_ids`, that ended the answer. None after any other end,
    such as the model's end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. The last one has `finish`."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Clients get the delta's `events` or its `shown_text`, not this text itself."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: PackedLogprobs | None = None
    """Log-probabilities of all prompt tokens except the first; in the first delta of a request that asked for them,
    else None."""

    @property
    def shown_text(self) -> str:
        """The text without the marks that only parsers need."""
        return self.text.replace(SPECIAL, "")

    def events(self, parser: AnswerParser | None) -> list[AnswerEvent]:
        """The events that are certain after this delta. `parser`: the answer's parser, which must get
        all deltas, in order."""
        if parser is None:
            return [Text(self.text)] if self.text else []
        events = [*parser.push(self.text)]
        if self.finish is not None:
            events += parser.flush()
        return events

    def without_reasons(self) -> "Delta":
        """A copy without workers' reasons, for clients that may not administer: reasons may name machines and
        files.
        """
        if self.finish is None or not self.finish.timing.transfers:
            return self
        timing = self.finish.timing
        transfers = tuple(replace(seen, record=replace(seen.record, reason="")) for seen in timing.transfers)
        return replace(self, finish=replace(self.finish, timing=replace(timing, transfers=transfers)))
