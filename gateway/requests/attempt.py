"""Attempt: one try at a request, and what each output or loss means for it; pure.

An attempt has a prefill request and a decode request, or only a decode request. A sub-request stays open
until its worker ends it, or until the attempt is closed. In the second case, its worker gets an abort.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.errors import InvalidRequest, RequestError
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole, WorkerRef
from baton.request import EngineRequest, ErrorKind, FinishReason, OnPreemption, RequestOutput
from baton.transfer import TransferRecord
from gateway.routing.placement import Placement


class Cause(Enum):
    """Why an attempt failed. The cause decides whether the failure counts against the request."""

    LOST = "lost"
    """A worker ended, is unreachable, or has ended its session with this gateway."""
    FAILED = "failed"
    """A healthy worker reported a failure."""
    GIVEN_BACK = "given_back"
    """The worker gave the request back for a reason of its own (see ErrorKind.GIVEN_BACK), or had left when the
    request came. Or the gateway took the request back, since its caller held more than its share."""
    REFUSED = "refused"
    """A healthy worker did not start the request, since the worker is full."""


_CAUSES = {ErrorKind.OVERLOADED: Cause.REFUSED, ErrorKind.GIVEN_BACK: Cause.GIVEN_BACK}

_FAILED = (ErrorKind.INTERNAL, ErrorKind.STEP_FAILED)
_NO_REASONS = (FinishReason.ABORT, FinishReason.HANDED_OVER)
"""Finish reasons of a prefill request that do not explain why its prompt did not reach the decode worker."""


class Verdict(Enum):
    """What to do with an output that does not fail the attempt."""

    DELIVER = "deliver"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt failed."""

    worker: str
    """The worker that caused the failure."""
    cause: Cause
    summary: str
    """The gateway's description of the failure. `reason` is the worker's description, which may name machines and
    files."""
    reason: str = ""
    is_prompt_lost: bool = False
    """The decode worker is healthy, but its prompt's KV did not arrive."""
    is_taken_back: bool = False
    """The gateway took the request back for other callers."""
    error: RequestError | None = None
    """The error if the request itself is at fault: then no other worker could serve the request either."""

    def __str__(self) -> str:
        return f"{self.summary}: {self.reason}" if self.reason else self.summary


@dataclass(slots=True)
class Attempt:
    """One attempt. Its sub-requests are open from its beginning, so it notices losses before any output."""

    engine_request_id: str
    """The request's id on its workers."""
    placement: Placement
    num_tokens_before: int
    """How many tokens the client had when the attempt began."""
    decode_recomputes: bool = False
    """If the prompt's KV does not arrive, the decode worker computes the prompt."""
    awaits_prompt_logprobs: bool = False
    """The prompt's log-probabilities are still to come, and only the prefill worker has them."""
    refs: Mapping[str, WorkerRef] = field(default_factory=dict)
    """The incarnations of the attempt's workers, by name."""
    on_preemption: OnPreemption = OnPreemption.RESUME
    """What the decode worker does with the request if it runs out of blocks."""
    number: int = 0
    """The attempt's number within its request, from 0."""
    began_at: float = 0.0
    """When the attempt began, on the gateway's clock."""
    ended_at: float | None = None
    """When the attempt ended; None while it is open."""
    failure: AttemptFailure | None = None
    open_workers: set[str] = field(init=False)
    """Workers whose sub-request is open."""
    is_prefill_lost: bool = False
    """The prefill worker was lost during the attempt, even if it has returned since."""
    _is_decoding: bool = False
    """The decode worker has sent an output, so the attempt no longer needs the prefill worker."""
    _has_prefilled: bool = False
    """The prefill worker has computed the prompt."""
    _lost_prompt: AttemptFailure | None = None
    """The decode worker reported that its prompt did not arrive. The prefill worker has not reported the
    reason yet."""
    _held_back: list[RequestOutput] = field(default_factory=list)
    """Outputs of the decode worker that came before the prompt's log-probabilities."""
    _is_prefill_aborted: bool = False
    _is_transfer_reported: bool = False
    _uncounted: set[str] = field(init=False)
    """Workers that `newly_ended` has not returned yet."""

    def __post_init__(self) -> None:
        self.open_workers = set(self.workers)
        self._uncounted = set(self.workers)

    @property
    def workers(self) -> tuple[str, ...]:
        """The attempt's workers, the decode worker first."""
        prefill = self.placement.prefill
        return (self.placement.decode,) if prefill is None else (self.placement.decode, prefill)

    def split(self, request: EngineRequest, transfer_id: str) -> list[tuple[str, EngineRequest]]:
        """The sub-request for each worker, to be sent in this order: the decode worker's first, so that it reserves
        blocks early.

        (transfer_id, attempt number) identifies a hand-over, so each attempt has a hand-over of its own. A prefill
        worker that runs out of blocks keeps the request and computes the prompt again later.
        """
        decode, prefill = self.placement.decode, self.placement.prefill
        if prefill is None:
            return [(decode, request)]
        number, refs = self.number, self.refs
        on_failure = OnLoadFailure.RECOMPUTE if self.decode_recomputes else OnLoadFailure.REPORT
        to_decode = KVTransferParams(TransferRole.CONSUMER, transfer_id, number, refs[prefill], on_failure)
        to_prefill = KVTransferParams(TransferRole.PRODUCER, transfer_id, number, refs[decode], on_failure)
        return [
            (decode, replace(request, kv_transfer=to_decode)),
            (prefill, replace(request, kv_transfer=to_prefill, on_preemption=OnPreemption.RESUME)),
        ]

    def has_progressed(self, num_tokens: int) -> bool:
        """Whether the client's `num_tokens` tokens include a token of this attempt's decode worker.

        The prefill worker's token does not count. Otherwise a request that never decodes would seem to
        progress.
        """
        return num_tokens > self.num_tokens_before + (self.placement.prefill is not None)

    @property
    def contributors(self) -> tuple[WorkerRef, ...]:
        """The workers that computed part of the answer. A prefill worker that failed is left out; then the decode
        worker computed the prompt.
        """
        has_computed = {self.placement.decode: self._is_decoding, self.placement.prefill: self._has_prefilled}
        return tuple(ref for name, ref in self.refs.items() if has_computed[name])

    def in_order(self, worker: str, output: RequestOutput) -> Iterable[tuple[str, RequestOutput]]:
        """The outputs to process now, each with its worker.

        The client gets the prompt's log-probabilities with its first token. So outputs of the decode worker that
        come before them are held back, and the prefill worker is still needed.
        """
        if not self.awaits_prompt_logprobs:
            return ((worker, output),)
        is_failure = output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        if worker == self.placement.decode and not is_failure:
            self._held_back.append(output)
            return ()
        self.awaits_prompt_logprobs = output.prompt_logprobs is None
        return self._with_held_back(worker, output)

    def _with_held_back(self, worker: str, output: RequestOutput) -> Iterator[tuple[str, RequestOutput]]:
        yield worker, output
        while self._held_back and not self.awaits_prompt_logprobs:  # `close` empties the list
            yield self.placement.decode, self._held_back.pop(0)

    def on_output(self, worker: str, output: RequestOutput) -> Verdict | AttemptFailure:
        """What a worker's output means for the attempt."""
        is_prefill, end = worker == self.placement.prefill, output.finish_reason
        if end is None and not is_prefill:  # nearly all outputs
            self._is_decoding = True
            return Verdict.DELIVER
        if end is not None:
            self.open_workers.discard(worker)
            self._has_prefilled |= is_prefill and end not in (FinishReason.ERROR, FinishReason.ABORT)
        if is_prefill and self._is_decoding:
            # The decode worker has sent an output, so the prompt arrived or was not needed.
            return Verdict.IGNORE
        if is_prefill and self._lost_prompt is not None and end in _NO_REASONS:
            return self._lost_prompt
        if end is FinishReason.ABORT and self.open_workers:
            # Wait for the other output: if a prefill worker itself ends a request, it notifies the decode
            # worker first.
            return Verdict.IGNORE
        if output.error_kind is ErrorKind.KV_LOAD_FAILED and self.placement.prefill in self.open_workers:
            # Wait for the prefill worker: if it gave the request back, this does not count as a failure.
            self._lost_prompt = self._failure(is_prefill, output)
            return Verdict.IGNORE
        if end in (FinishReason.ERROR, FinishReason.ABORT):
            may_recompute = output.error_kind in (*_FAILED, ErrorKind.GIVEN_BACK)
            if is_prefill and may_recompute and self.decode_recomputes and self.open_workers:
                return Verdict.IGNORE
            return self._failure(is_prefill, output)
        self._is_decoding |= not is_prefill
        return Verdict.DELIVER

    def on_lost(self, worker: str, reason: str, *, has_left: bool = False) -> AttemptFailure | None:
        """Handles a worker's loss. Returns the failure, or None if the attempt no longer needs the worker.

        If the worker left as planned, the request arrived too late to be refused. It then counts as given back.
        """
        is_prefill = worker == self.placement.prefill
        self.is_prefill_lost |= is_prefill
        if is_prefill and self._is_decoding:
            self.open_workers.discard(worker)  # only its report of the hand-over was still to come
            return None
        # A prefill worker whose request has ended is still needed until the decode worker has sent an output.
        if worker not in self.open_workers and not is_prefill:
            return None
        if is_prefill and self.decode_recomputes and self.open_workers - {worker}:
            self.open_workers.discard(worker)
            return None
        # The sub-request stays open until the attempt is closed: a worker that is still reachable then gets an abort.
        if has_left:
            return AttemptFailure(worker, Cause.GIVEN_BACK, "the worker has left", reason)
        return AttemptFailure(worker, Cause.LOST, "the worker was lost", reason, is_prompt_lost=is_prefill)

    def transfer_of(self, worker: str, output: RequestOutput) -> TransferRecord | None:
        """The decode worker's record of the hand-over, if this output has it. Returns each record once."""
        is_news = worker == self.placement.decode and not self._is_transfer_reported
        if not is_news or self.placement.pair is None or output.stage_times is None:
            return None
        (*_, transfer) = output.stage_times.transfers or (None,)
        self._is_transfer_reported = transfer is not None
        return transfer

    def prefill_to_abort(self) -> str | None:
        """The prefill worker, if the decode worker has reported that the prompt is missing. Only the first call returns
        it; otherwise None."""
        if self._lost_prompt is None or self._is_prefill_aborted:
            return None
        self._is_prefill_aborted = True
        return self.placement.prefill

    def contradiction(self, worker: str) -> AttemptFailure:
        """The failure of a worker that sampled another token than the client already has at this position."""
        return AttemptFailure(
            worker, Cause.FAILED, "it sampled another token than the one that was delivered"
        )

    def taken_back(self) -> AttemptFailure:
        """The gateway takes the request back, for other callers."""
        why = "its caller held more than its share, and other callers have requests"
        return AttemptFailure(self.placement.decode, Cause.GIVEN_BACK, why, is_taken_back=True)

    def abandoned(self) -> AttemptFailure | None:
        """A failure if no sub-request is open. Call it only while the answer is incomplete."""
        if self.open_workers:
            return None
        return AttemptFailure(self.placement.decode, Cause.FAILED, "no worker is still running this request")

    def newly_ended(self) -> list[str]:
        """Workers whose sub-requests ended since the last call. Returns each worker once."""
        if len(self._uncounted) == len(self.open_workers):
            return []
        ended = sorted(self._uncounted - self.open_workers)
        self._uncounted &= self.open_workers
        return ended

    def close(self) -> list[str]:
        """Ends all open sub-requests. Returns the workers that must get an abort."""
        still_open = sorted(self.open_workers)
        self.open_workers.clear()
        self._held_back.clear()
        return still_open

    def _failure(self, is_prefill: bool, output: RequestOutput) -> AttemptFailure:
        reason, kind = output.error or f"ended with {output.finish_reason}", output.error_kind
        is_prompt_lost = kind is ErrorKind.KV_LOAD_FAILED or (is_prefill and kind in _FAILED)
        is_prefill_at_fault = is_prefill or is_prompt_lost
        worker = self.placement.prefill if is_prefill_at_fault else None
        return AttemptFailure(
            worker or self.placement.decode,
            _CAUSES.get(kind, Cause.FAILED),
            f"the {'prefill' if is_prefill else 'decode'} request failed",
            reason,
            is_prompt_lost=is_prompt_lost,
            error=InvalidRequest(*_split_field(reason)) if kind is ErrorKind.INVALID_REQUEST else None,
        )


def _split_field(reason: str) -> tuple[str, str]:
    """Splits a worker's message "field: problem" into the field and the problem; see InvalidRequest."""
    name, _, message = reason.partition(": ")
    return (name, message) if message else ("request", reason)
