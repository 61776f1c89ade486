"""ClientRequest: one client's request from its first token to its last, whoever computes them; no socket, no clock.

Outputs of both workers, and of repeated attempts, come in in any order and more than once. Each says the position of
its tokens, and what goes out is every position once, in order. An attempt elsewhere goes on behind what the client has
already (`output_token_ids`); the state of its text stays here, so that a stop string may begin on one worker and end
on another.
"""

from array import array
from dataclasses import dataclass, field, replace
from itertools import pairwise

from baton.request import FinishReason, RequestOutput, StageTimes, TokenLogprobs
from baton.sampling import SamplingParams
from baton.transfer import TransferRecord
from gateway.requests.ttft import FirstTokenClock, HandoverParts, TtftParts, split_handover
from gateway.routing.placement import Mode, Placement
from gateway.text import TextStream


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds; see Timing in generation_service.proto."""

    ttft_s: float
    itl_s: tuple[float, ...]
    queue_s: float
    prefill_s: float
    transfer_s: float
    transfer_bytes: int
    handover_s: float
    decode_s: float
    total_s: float
    transfer_wait_s: float
    transport: str
    transfers: tuple["SeenTransfer", ...] = ()
    ttft_parts: TtftParts | None = None
    """They add up to `ttft_s`; None if there was no token."""
    handover_parts: HandoverParts | None = None
    """They add up to `handover_s`; None if nothing was handed over."""
    handover_ended_s: float = 0.0
    """When the later of these two tokens came, since the request's arrival."""


@dataclass(frozen=True, slots=True)
class SeenTransfer:
    """A hand-over as one worker saw it, counted from the request's arrival at the gateway."""

    worker: str
    record: TransferRecord


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
    """What a client gets at once. The last one has `finish`."""

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


@dataclass(slots=True)
class ClientRequest:
    """Feed it every output that any worker reports for the request; hand on the deltas it returns."""

    num_prompt_tokens: int
    sampling_params: SamplingParams
    text: TextStream
    arrived_at: float
    intake_s: float = 0.0
    """What it took from its arrival to have tokens, and to stand in line."""
    placement: Placement | None = None
    num_attempts: int = 0
    _delivered: "array[int]" = field(default_factory=lambda: array("I"))
    """An answer may have a million tokens; as an array, and its times, they take 12 bytes each."""
    _early: dict[int, tuple[int, TokenLogprobs | None]] = field(default_factory=dict)
    """By position: tokens whose predecessors have not come yet."""
    _delivered_at: "array[float]" = field(default_factory=lambda: array("d"))
    _num_cached_tokens: int = 0
    _stages: dict[str, StageTimes] = field(default_factory=dict)
    _attempt_began_s: float = 0.0
    """Since the request's arrival."""
    _num_tokens_before: int = 0
    """What the client had when the attempt began."""
    _transfers: dict[tuple[int, str], tuple[SeenTransfer, ...]] = field(default_factory=dict)
    """By attempt and worker; those of attempts that failed, too."""
    _last: tuple[RequestOutput, int] | None = None
    """The output that ends the request, and how many tokens it ends at."""
    _first_token: FirstTokenClock = field(default_factory=FirstTokenClock)
    _first_token_stages: dict[str, StageTimes] | None = None
    """What the attempt's workers told that brought it, once another attempt has begun."""

    def __post_init__(self) -> None:
        self._first_token.waits_from(self.intake_s)

    def begin_attempt(self, placement: Placement, now: float) -> None:
        """Somebody (else) computes it from now on, behind what the client has.

        Tokens that came from others without their predecessors are forgotten: what is computed anew need not fit them.
        """
        self.placement = placement
        self._attempt_began_s = now - self.arrived_at
        self._first_token.begin_attempt(placement, self._attempt_began_s)
        self.num_attempts += 1
        self._num_tokens_before = len(self._delivered)
        if self._delivered and self._first_token_stages is None:
            self._first_token_stages = self._stages.copy()
        self._stages.clear()
        self._early.clear()
        self._last = None
        if not self._delivered:
            self._num_cached_tokens = 0

    def end_attempt(self, now: float) -> None:
        """It came to nothing; the request waits for another one."""
        self._first_token.end_attempt(now - self.arrived_at)

    @property
    def ttft_parts(self) -> TtftParts | None:
        """None while there is no token."""
        stages = self._stages if self._first_token_stages is None else self._first_token_stages
        return self._first_token.parts(stages)

    @property
    def transfers(self) -> tuple[SeenTransfer, ...]:
        """All that workers told of, in the order of the attempts."""
        return tuple(seen for part in self._transfers.values() for seen in part)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """What the client has of the answer."""
        return tuple(self._delivered)

    @property
    def num_output_tokens(self) -> int:
        return len(self._delivered)

    def end_if_whole(self, now: float) -> Delta | None:
        """The last delta, if the client has every token that it asked for, and only the news of the end was lost."""
        if len(self._delivered) < self.sampling_params.max_tokens:
            return None
        return Delta(text=self.text.flush(), finish=self._make_finish(FinishReason.LENGTH, None, now))

    def fell_back(self) -> None:
        """The prompt did not arrive from elsewhere, and the decode worker computed it itself."""
        assert self.placement is not None
        self.placement = Placement(
            Mode.LOCAL, None, self.placement.decode, is_fallback=True, reason="the prompt did not arrive"
        )

    @property
    def path(self) -> str:
        """Which way the latest attempt really took."""
        assert self.placement is not None
        return "fallback" if self.placement.is_fallback else self.placement.mode.value

    @property
    def path_reason(self) -> str:
        """Why that way, in a few words; may be empty."""
        assert self.placement is not None
        return self.placement.reason

    def contradicts(self, output: RequestOutput) -> bool:
        """Whether it says that a token is another one than the client was told: what follows in it is no continuation.

        As when a prompt that one worker had computed is computed again by another, with a rounding error of its own.
        """
        told = self._delivered[output.first_position : output.first_position + len(output.token_ids)]
        return any(ours != theirs for ours, theirs in zip(told, output.token_ids, strict=False))

    def accept(self, worker: str, output: RequestOutput, now: float) -> Delta | None:
        """The delta that this output completes, or None while there is nothing new for the client."""
        self.note_times(worker, output)
        if output.first_position == len(self._delivered) and not self._early:
            token_ids, logprobs = output.token_ids, output.logprobs or ()  # as nearly all come
        else:
            token_ids, logprobs = self._sort(output)
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._last = (output, output.first_position + len(output.token_ids))
        delta = self._deliver(token_ids, logprobs, now)
        if delta is not None and self._delivered_at:
            self._first_token.first_token(worker, self._delivered_at[0] - self.arrived_at)
        return delta

    def _sort(self, output: RequestOutput) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """What is next for the client, now that this has come too."""
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        for position, token in enumerate(zip(output.token_ids, logprobs, strict=True), output.first_position):
            if position >= len(self._delivered):
                self._early.setdefault(position, token)
        ready: list[tuple[int, TokenLogprobs | None]] = []
        while (position := len(self._delivered) + len(ready)) in self._early:
            ready.append(self._early.pop(position))
        return tuple(token_id for token_id, _ in ready), tuple(each for _, each in ready if each is not None)

    def note_times(self, worker: str, output: RequestOutput) -> None:
        """What an output says about the past. All that is of interest in one that ends an attempt."""
        if not self._num_tokens_before:  # later, the answer's own tokens may be among them
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.stage_times is not None:
            self._stages[worker] = output.stage_times
            self._transfers[self.num_attempts, worker] = tuple(
                SeenTransfer(worker, record.shifted(self._attempt_began_s))
                for record in output.stage_times.transfers
            )

    def _deliver(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> Delta | None:
        num_counted, text = self.text.push(token_ids)
        self._delivered.extend(token_ids[:num_counted])
        self._delivered_at.extend([now] * num_counted)
        finish = self._finish(now)
        if finish is None and not token_ids:
            return None
        if finish is not None and self.text.matched_stop is None:
            text += self.text.flush()
        return Delta(token_ids[:num_counted], text, logprobs[:num_counted], finish)

    def _finish(self, now: float) -> Finish | None:
        """How the request ended, if with this delta it has."""
        reason, stop_token_id = FinishReason.STOP, None
        if self.text.matched_stop is None:
            if self._last is None or len(self._delivered) < self._last[1]:
                return None
            assert self._last[0].finish_reason is not None
            reason, stop_token_id = self._last[0].finish_reason, self._last[0].stop_token_id
        return self._make_finish(reason, stop_token_id, now)

    def _make_finish(self, reason: FinishReason, stop_token_id: int | None, now: float) -> Finish:
        assert self.placement is not None
        return Finish(
            reason=reason,
            matched_stop=self.text.matched_stop,
            stop_token_id=stop_token_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=len(self._delivered),
            num_cached_tokens=self._num_cached_tokens,
            timing=self._timing(now, self.placement),
            placement=self.placement,
            num_attempts=self.num_attempts,
        )

    def _timing(self, now: float, placement: Placement) -> Timing:
        at = self._delivered_at
        none = StageTimes()
        decode = self._stages.get(placement.decode, none)
        prefill = self._stages.get(placement.prefill, none) if placement.prefill else decode
        gaps = tuple(after - before for before, after in pairwise(at))
        ttft_s = at[0] - self.arrived_at if at else now - self.arrived_at
        first = (
            self._num_tokens_before
        )  # of the latest attempt, which is the one that its workers' times are of
        is_handed_over = placement.mode is Mode.DISAGGREGATED and len(gaps) > first
        handover_s = gaps[first] if is_handed_over else 0.0
        return Timing(
            ttft_s=ttft_s,
            itl_s=gaps,
            queue_s=prefill.queue_s,
            prefill_s=prefill.prefill_s,
            transfer_s=decode.transfer_moving_s,
            transfer_bytes=decode.transfer_bytes,
            transfer_wait_s=decode.transfer_s - decode.transfer_moving_s,
            transport=decode.transport,
            transfers=self.transfers,
            handover_s=handover_s,
            decode_s=at[-1] - at[0] if at else 0.0,
            total_s=now - self.arrived_at,
            ttft_parts=self.ttft_parts,
            handover_parts=split_handover(handover_s, decode, self._exposed_s(placement))
            if handover_s
            else None,
            handover_ended_s=ttft_s + sum(gaps[: first + 1]) if is_handed_over else 0.0,
        )

    def _exposed_s(self, placement: Placement) -> float | None:
        """What the prefill worker said of its hand-over; None if it has not said."""
        seen = self._transfers.get((self.num_attempts, placement.prefill or ""), ())
        return next((each.record.exposed_s for each in seen if each.record.exposed_s > 0.0), None)
