"""Attempt: one try at a request on one pair of workers, and what each output or loss means for it; pure.

An attempt has two sub-requests, a prefill request and a decode request, or the decode request alone. Each stays open
until its worker ends it, or until the attempt is closed and the worker is told to abort it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.errors import InvalidRequest, RequestError
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole, WorkerRef
from baton.request import EngineRequest, ErrorKind, FinishReason, OnPreemption, RequestOutput
from gateway.routing.placement import Placement


class Cause(Enum):
    """Why an attempt failed, and so whether it counts against the request."""

    LOST = "lost"
    """A worker ended, fell silent, or has forgotten this gateway."""
    FAILED = "failed"
    """A worker that lives could not do it."""
    GIVEN_BACK = "given_back"
    """A healthy worker stops working on it: it drains, changes its role, or has no blocks left."""
    REFUSED = "refused"
    """A healthy worker did not begin it: it is full."""


_CAUSES = {ErrorKind.OVERLOADED: Cause.REFUSED, ErrorKind.GIVEN_BACK: Cause.GIVEN_BACK}

_NO_REASONS = (FinishReason.ABORT, FinishReason.HANDED_OVER)
"""Ends of a prefill request that do not say why its prompt did not reach the decode worker."""


class Verdict(Enum):
    """What an output is good for, where it does not fail the attempt."""

    DELIVER = "deliver"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt came to nothing."""

    worker: str
    """Which worker caused it."""
    cause: Cause
    summary: str
    """Without the reason, which is in a worker's words and may name machines and files."""
    reason: str = ""
    is_prompt_lost: bool = False
    """The decode worker is healthy, but has no prompt to continue."""
    error: RequestError | None = None
    """The request's own fault: no other worker could serve it either."""

    def __str__(self) -> str:
        return f"{self.summary}: {self.reason}" if self.reason else self.summary


@dataclass(slots=True)
class Attempt:
    """Its sub-requests are open from the moment of placement, so that no loss in between goes unnoticed."""

    engine_request_id: str
    """The request's id on its workers."""
    placement: Placement
    num_tokens_before: int
    """Tokens of the answer that the client had when the attempt began."""
    decode_recomputes: bool = False
    """The decode worker computes a prompt that does not arrive."""
    incarnations: Mapping[str, str] = field(default_factory=dict)
    """By worker."""
    number: int = 0
    """Counts from 0."""
    began_at: float = 0.0
    """On the gateway's clock."""
    ended_at: float | None = None
    """None while it is open."""
    failure: AttemptFailure | None = None
    open_workers: set[str] = field(init=False)
    """Workers whose sub-request is open."""
    _is_decoding: bool = False
    """The decode worker has sent something, so it needs no prefill worker any more."""
    _lost_prompt: AttemptFailure | None = None
    """The decode worker reports that its prompt will not come. Why, the prefill worker has yet to report."""
    _is_prefill_aborted: bool = False
    _uncounted: set[str] = field(init=False)
    """Workers whose sub-request's end `newly_ended` has not returned yet."""

    def __post_init__(self) -> None:
        self.open_workers = set(self.workers)
        self._uncounted = set(self.workers)

    @property
    def workers(self) -> tuple[str, ...]:
        """The decode worker first."""
        prefill = self.placement.prefill
        return (self.placement.decode,) if prefill is None else (self.placement.decode, prefill)

    def on_output(self, worker: str, output: RequestOutput) -> Verdict | AttemptFailure:
        """What a worker's output means for the attempt."""
        is_prefill, end = worker == self.placement.prefill, output.finish_reason
        if end is None and not is_prefill:  # nearly all of them
            self._is_decoding = True
            return Verdict.DELIVER
        if end is not None:
            self.open_workers.discard(worker)
        if is_prefill and self._is_decoding:
            # The prompt arrived or was not needed: the decode worker reported the first token.
            return Verdict.IGNORE
        if is_prefill and self._lost_prompt is not None and end in _NO_REASONS:
            return self._lost_prompt
        if end is FinishReason.ABORT and self.open_workers:
            # A prefill worker that ends the request itself tells the decode worker first.
            return Verdict.IGNORE
        if output.error_kind is ErrorKind.KV_LOAD_FAILED and self.placement.prefill in self.open_workers:
            # The prefill worker may have given the request back, which counts as no failure, and may report it later.
            self._lost_prompt = self._failure(is_prefill, output)
            return Verdict.IGNORE
        if end in (FinishReason.ERROR, FinishReason.ABORT):
            may_recompute = output.error_kind in (ErrorKind.INTERNAL, ErrorKind.GIVEN_BACK)
            if is_prefill and may_recompute and self.decode_recomputes and self.open_workers:
                return Verdict.IGNORE
            return self._failure(is_prefill, output)
        self._is_decoding |= not is_prefill
        return Verdict.DELIVER

    def on_lost(self, worker: str, reason: str, *, was_draining: bool = False) -> AttemptFailure | None:
        """A worker's loss: None if the attempt does not need that worker (any more).

        A request that reached a draining worker too late to be refused is lost with it, and counts as given back.
        """
        is_prefill = worker == self.placement.prefill
        if is_prefill and self._is_decoding:
            self.open_workers.discard(worker)  # all that it had left to say is that it handed over
            return None
        # What a prefill worker has handed over may be lost with it, as long as no worker has seen it arrive.
        if worker not in self.open_workers and not is_prefill:
            return None
        if is_prefill and self.decode_recomputes and self.open_workers - {worker}:
            self.open_workers.discard(worker)
            return None
        # The sub-request stays open until the attempt is closed: a worker that is reachable after all gets the abort.
        if was_draining:
            return AttemptFailure(worker, Cause.GIVEN_BACK, "the worker has left", reason)
        return AttemptFailure(worker, Cause.LOST, "the worker was lost", reason, is_prompt_lost=is_prefill)

    def prefill_to_abort(self) -> str | None:
        """A prefill worker whose sub-request is open only to learn how it ends; returned once."""
        if self._lost_prompt is None or self._is_prefill_aborted:
            return None
        self._is_prefill_aborted = True
        return self.placement.prefill

    def contradiction(self, worker: str) -> AttemptFailure:
        """A worker sampled another token than the client has, so it does not continue that answer."""
        return AttemptFailure(
            worker, Cause.FAILED, "it sampled another token than the one that was delivered"
        )

    def abandoned(self) -> AttemptFailure | None:
        """A failure if no sub-request is open, though the answer is not whole."""
        if self.open_workers:
            return None
        return AttemptFailure(self.placement.decode, Cause.FAILED, "no worker is still running this request")

    def newly_ended(self) -> list[str]:
        """Workers whose sub-requests ended since the last call: each is returned once."""
        if len(self._uncounted) == len(self.open_workers):
            return []
        ended = sorted(self._uncounted - self.open_workers)
        self._uncounted &= self.open_workers
        return ended

    def close(self) -> list[str]:
        """Ends what is open; returns the workers that must abort it."""
        still_open = sorted(self.open_workers)
        self.open_workers.clear()
        return still_open

    def _failure(self, is_prefill: bool, output: RequestOutput) -> AttemptFailure:
        reason, kind = output.error or f"ended with {output.finish_reason}", output.error_kind
        is_prompt_lost = kind is ErrorKind.KV_LOAD_FAILED or (is_prefill and kind is ErrorKind.INTERNAL)
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


def sub_requests(
    request: EngineRequest, attempt: Attempt, refs: Mapping[str, WorkerRef], transfer_id: str
) -> list[tuple[str, EngineRequest]]:
    """What to send to each worker, in this order: the first one has to reserve blocks.

    (transfer_id, attempt number) names the hand-over, if there is one; no two attempts share it. A prefill
    worker that runs out of blocks computes its prompt again when it has some: it has nothing else to do for the
    request.
    """
    decode, prefill = attempt.placement.decode, attempt.placement.prefill
    if prefill is None:
        return [(decode, request)]
    number = attempt.number
    on_failure = OnLoadFailure.RECOMPUTE if attempt.decode_recomputes else OnLoadFailure.REPORT
    to_decode = KVTransferParams(TransferRole.CONSUMER, transfer_id, number, refs[prefill], on_failure)
    to_prefill = KVTransferParams(TransferRole.PRODUCER, transfer_id, number, refs[decode], on_failure)
    return [
        (decode, replace(request, kv_transfer=to_decode)),
        (prefill, replace(request, kv_transfer=to_prefill, on_preemption=OnPreemption.RESUME)),
    ]


def _split_field(reason: str) -> tuple[str, str]:
    """The field that a worker's refusal begins with; see InvalidRequest."""
    name, _, message = reason.partition(": ")
    return (name, message) if message else ("request", reason)
