"""RequestState: one client's request from its arrival to its end, with the answer so far; pure.

                     +------------- an attempt failed -------------+
                     v                                             |
    arrived ---> WAITING ---- a worker has room ----> PLACED ------+
                     |                                   |
                     |  refused, too late, aborted,      |  answered, given up, aborted,
                     |  client left                      |  client left
                     +------------> FINISHED <-----------+

Outputs of both workers, and of repeated attempts, may arrive in any order and more than once. Each output
contains the position of its first token. The client gets the token of each position once, in order. A new
attempt continues after the delivered tokens. The state of the text stays here, so a stop string may begin on
one worker and end on another.
"""

from array import array
from collections import deque
from enum import Enum
from functools import cached_property

from baton.errors import DeadlinePassed
from baton.request import EngineRequest, FinishReason, PackedLogprobs, RequestOutput, TokenLogprobs
from gateway.admission.suspects import Identity, identity_of
from gateway.requests.attempt import Attempt, AttemptFailure, Verdict
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.requests.retry import RetryState
from gateway.routing.cost import EXPECTED_NEW_TOKENS
from gateway.routing.placement import Mode, Placement
from gateway.timing.latency_window import LatencyWindow
from gateway.timing.request_times import RequestTimes

MAX_RECORDED_ATTEMPTS = 32
"""How many of the latest attempts are kept. A request may have more: only the time for which it
may look for a place limits the number of refused attempts."""


DEADLINE_SLACK_S = 0.05
"""A disconnect this close to the deadline counts as a timeout. Frontends watch the deadline too: when it
passes, they close the stream, which looks like a disconnect."""


class RequestPhase(Enum):
    WAITING = "waiting"
    PLACED = "placed"
    FINISHED = "finished"


class RequestState:
    """The state of one request. Only the dispatcher changes it."""

    def __init__(
        self, request: GatewayRequest, retry: RetryState, window: LatencyWindow, arrived_at: float
    ) -> None:
        self.request = request
        self.retry = retry
        self.arrived_at = arrived_at
        self.phase = RequestPhase.WAITING
        self.attempts: deque[Attempt] = deque(maxlen=MAX_RECORDED_ATTEMPTS)
        """The latest attempts, oldest first. The last attempt is running while the request is PLACED."""
        self.placement: Placement | None = None
        """The latest attempt's placement. After a fallback, the placement that was really used."""
        self.times = RequestTimes(arrived_at, request.preprocess_s, window)
        self.finish: Finish | None = None
        self._delivered = array("I")
        """The client's tokens. An answer may have a million tokens; each takes 12 bytes with its time."""
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}
        """Tokens that arrived before their predecessors, by position."""
        self._last: tuple[RequestOutput, int] | None = None
        """The output with the finish, and how many tokens the complete answer has."""
        self._num_cached_tokens = 0
        self._prompt_logprobs: PackedLogprobs | None = None
        """The prompt's log-probabilities, from their arrival until the client gets them with its first token."""
        self._draft_outputs: dict[int, RequestOutput] = {}
        """Outputs of steps with drafts, by first position. Each stays here until the client has its tokens."""
        self._num_draft_tokens = 0
        self._num_accepted_draft_tokens = 0

    # the request

    @cached_property
    def identity(self) -> Identity:
        request = self.request
        return identity_of(self.caller, request.prompt_token_ids, request.sampling_params.structured_output)

    @property
    def caller(self) -> str:
        """The caller's name."""
        return self.request.caller.name

    @property
    def num_tokens(self) -> int:
        """The likely cost in tokens: the prompt, and an answer of at most EXPECTED_NEW_TOKENS."""
        num_new_tokens = min(self.request.sampling_params.max_tokens, EXPECTED_NEW_TOKENS)
        return len(self.request.prompt_token_ids) + num_new_tokens

    def time_left(self, now: float) -> float | None:
        return None if self.request.deadline is None else max(0.0, self.request.deadline - now)

    def client_error(self, error: BaseException, now: float) -> BaseException:
        """Why the client's stream ended. A disconnect close to the deadline counts as DeadlinePassed."""
        is_disconnect, time_left_s = not isinstance(error, Exception), self.time_left(now)
        if is_disconnect and time_left_s is not None and time_left_s <= DEADLINE_SLACK_S:
            return DeadlinePassed("the request's deadline passed")
        return error

    # attempts

    @property
    def num_attempts(self) -> int:
        return self.retry.num_attempts

    @property
    def attempt(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    @property
    def is_in_prefill(self) -> bool:
        """Whether the request's latest attempt has not brought a token yet."""
        return len(self._delivered) == self.attempt.num_tokens_before

    @property
    def was_taken_back(self) -> bool:
        """Whether the gateway took the latest attempt back for other callers."""
        failure = self.attempt.failure if self.attempts else None
        return failure is not None and failure.is_taken_back

    @property
    def path(self) -> str | None:
        """The path of a complete answer; None while the answer is incomplete."""
        if self.finish is None:
            return None
        placement = self.finish.placement
        return "fallback" if placement.is_fallback else placement.mode.value

    def begin(self, attempt: Attempt) -> None:
        """Begins an attempt. Drops tokens that arrived before their predecessors: the new attempt may compute
        other tokens."""
        assert self.phase is RequestPhase.WAITING, f"it is {self.phase.value}"
        self.phase = RequestPhase.PLACED
        self.attempts.append(attempt)
        self.placement = attempt.placement
        self.times.begin_attempt(attempt.number, attempt.placement, attempt.began_at)
        self._early.clear()
        self._draft_outputs.clear()
        self._last = None
        self._prompt_logprobs = None
        if not self._delivered:
            self._num_cached_tokens = 0

    def end_attempt(self, now: float, failure: AttemptFailure | None = None) -> None:
        assert self.phase is RequestPhase.PLACED, f"it is {self.phase.value}"
        self.phase = RequestPhase.WAITING
        self.attempt.ended_at = now
        if failure is not None:
            self.times.end_attempt(now)
            self.attempt.failure = failure if failure.error is None else None

    def sub_requests(
        self, transfer_id: str, now: float, *, is_suspect: bool = False
    ) -> list[tuple[str, EngineRequest]]:
        """The latest attempt's sub-request for each of its workers."""
        request, attempt = self.request, self.attempt
        whole = EngineRequest(
            request_id=attempt.engine_request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            priority=request.priority,
            timeout_s=self.time_left(now),
            cache_salt=request.cache_salt,
            output_token_ids=self.output_token_ids,
            on_preemption=attempt.on_preemption,
            caller=request.caller.number,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            is_suspect=is_suspect,
        )
        return attempt.split(whole, transfer_id)

    # the answer

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The tokens that the client has."""
        return tuple(self._delivered)

    @property
    def num_output_tokens(self) -> int:
        return len(self._delivered)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the prompt, and of the answer so far."""
        return len(self.request.prompt_token_ids) + len(self._delivered)

    def on_output(self, worker: str, output: RequestOutput, now: float) -> Delta | AttemptFailure | None:
        """Processes an output of the latest attempt. Returns the delta for the client, the attempt's failure,
        or None.
        """
        attempt = self.attempt
        if output.num_cached_tokens and not attempt.num_tokens_before:
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.stage_times is not None:
            self.times.note_stages(worker, output.stage_times)
        verdict = attempt.on_output(worker, output)
        if verdict is not Verdict.DELIVER:
            return None if verdict is Verdict.IGNORE else verdict
        if self._contradicts(output):
            return attempt.contradiction(worker)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if output.num_draft_tokens:
            self._draft_outputs.setdefault(output.first_position, output)
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._last = (output, output.first_position + len(output.token_ids))
        if output.token_ids or self._last is not None:
            self._note_fallback(attempt, worker, output)
        if output.first_position == len(self._delivered) and not self._early:  # nearly all outputs
            return self._deliver(worker, output.token_ids, output.logprobs or (), now)
        return self._deliver(worker, *self._in_order(output), now)

    def end_if_whole(self, now: float) -> Delta | None:
        """The last delta, if the client has all requested tokens and only the output with the finish was lost."""
        if len(self._delivered) < self.request.sampling_params.max_tokens:
            return None
        self.finish = self._make_finish(FinishReason.LENGTH, None, now)
        return Delta(text=self.request.text.flush(), finish=self.finish)

    def _contradicts(self, output: RequestOutput) -> bool:
        """Whether the output has another token at a position that the client already has, or an impossible position.

        This happens when another worker recomputes a prompt with slightly different rounding. Such an output
        does not continue the client's answer. Only a faulty worker sends an impossible position.
        """
        first = output.first_position
        if first < 0:
            return True
        if first >= len(self._delivered):
            return False
        known = self._delivered[first : first + len(output.token_ids)]
        return any(ours != theirs for ours, theirs in zip(known, output.token_ids, strict=False))

    def _note_fallback(self, attempt: Attempt, worker: str, output: RequestOutput) -> None:
        """Notes that the decode worker computed the prompt itself instead of receiving it from the prefill worker."""
        decode, times = attempt.placement.decode, output.stage_times
        is_recomputed = times is not None and not times.transfer_bytes
        if worker == decode and attempt.placement.prefill is not None and is_recomputed:
            self.placement = Placement(
                Mode.LOCAL, None, decode, is_fallback=True, reason="the prompt's KV cache did not arrive"
            )

    def _in_order(self, output: RequestOutput) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Stores the output's new tokens. Returns all tokens that the client can get now, in order."""
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        for position, token in enumerate(zip(output.token_ids, logprobs, strict=True), output.first_position):
            if position >= len(self._delivered):
                self._early.setdefault(position, token)
        ready: list[tuple[int, TokenLogprobs | None]] = []
        while (position := len(self._delivered) + len(ready)) in self._early:
            ready.append(self._early.pop(position))
        return tuple(token_id for token_id, _ in ready), tuple(each for _, each in ready if each is not None)

    def _deliver(
        self, worker: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> Delta | None:
        text_stream, num_before = self.request.text, len(self._delivered)
        num_counted, text = text_stream.push(token_ids, self._stop_token_after(num_before + len(token_ids)))
        self._delivered.extend(token_ids[:num_counted])
        if self._draft_outputs:
            self._count_drafts(num_before)
        self.times.note_tokens(worker, num_counted, now)
        if text_stream.matched_stop is not None:
            self.finish = self._make_finish(FinishReason.STOP, None, now)
        elif self._last is not None and len(self._delivered) >= self._last[1]:
            last, _ = self._last
            assert last.finish_reason is not None
            self.finish = self._make_finish(last.finish_reason, last.stop_token_id, now)
            text += text_stream.flush()
        elif not token_ids:
            return None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return Delta(token_ids[:num_counted], text, logprobs[:num_counted], self.finish, prompt_logprobs)

    def _stop_token_after(self, num_tokens: int) -> int | None:
        """The end-of-sequence or stop token that ends the answer after this many tokens, if such a token does."""
        if self._last is None or num_tokens < self._last[1]:
            return None
        return self._last[0].stop_token_id

    def _count_drafts(self, num_before: int) -> None:
        """Counts the drafts of the outputs with new tokens; `num_before` tokens were delivered before.

        An output begins with its accepted drafts. Those that the client does not get, or already has, do not count
        as accepted.
        """
        num_delivered = len(self._delivered)
        for first in [first for first in self._draft_outputs if first < num_delivered]:
            output = self._draft_outputs.pop(first)
            if first + len(output.token_ids) > num_before:
                end = min(first + output.num_accepted_draft_tokens, num_delivered)
                self._num_draft_tokens += output.num_draft_tokens
                self._num_accepted_draft_tokens += max(0, end - max(first, num_before))

    def _make_finish(self, reason: FinishReason, stop_token_id: int | None, now: float) -> Finish:
        assert self.placement is not None
        matched_stop = self.request.text.matched_stop
        is_named = stop_token_id in self.request.sampling_params.stop_token_ids
        return Finish(
            reason=reason,
            matched_stop=matched_stop,
            stop_token_id=stop_token_id,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_completion_tokens=len(self._delivered),
            num_cached_tokens=self._num_cached_tokens,
            timing=self.times.timing(self.placement, self.attempt.num_tokens_before, now),
            placement=self.placement,
            num_attempts=self.num_attempts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_draft_tokens=self._num_accepted_draft_tokens,
            stop_reason=stop_token_id if is_named else matched_stop,
        )
