"""Attempt: one try at a request, its legs, and what becomes of it as they end or are lost; pure, knows no socket."""

from dataclasses import dataclass, field, replace
from enum import Enum

from baton.errors import InvalidRequest
from baton.kv import KVTransferParams, OnLoadFailure, TransferRole, WorkerRef
from baton.request import EngineRequest, ErrorKind, FinishReason, OnPreemption, RequestOutput, StageTimes
from gateway.routing.placement import Placement


class Cause(Enum):
    """Why an attempt came to nothing, and so whether that counts against anybody."""

    LOST = "lost"
    """A worker is gone, silent, or has lost us."""
    FAILED = "failed"
    """A worker that lives could not do it."""
    GIVEN_BACK = "given_back"
    """A worker that is well will not go on with it: it drains, changes its role, or has no blocks left."""
    REFUSED = "refused"
    """A worker that is well did not begin it: it is full."""


_NO_REASONS = (FinishReason.ABORT, FinishReason.HANDED_OVER)
"""Ends of a prefill leg that do not say why its prompt did not reach the decode worker."""

CAUSES = {ErrorKind.OVERLOADED: Cause.REFUSED, ErrorKind.GIVEN_BACK: Cause.GIVEN_BACK}


class AttemptFailed(Exception):
    """This attempt came to nothing, through no fault of the request, but because of `worker`."""

    def __init__(
        self, worker: str, cause: Cause, summary: str, reason: str = "", *, is_prompt_lost: bool = False
    ) -> None:
        super().__init__(f"{summary}: {reason}" if reason else summary)
        self.summary = summary
        """Without the reason: that is a worker's word, or how its connection went, and may name machines and files."""
        self.worker = worker
        self.cause = cause
        self.is_prompt_lost = is_prompt_lost
        """The decode worker is well, but has no prompt to go on with."""


@dataclass(slots=True)
class Attempt:
    """Its legs are open from the moment of placement, so that no loss in between goes unnoticed."""

    engine_request_id: str
    placement: Placement
    num_tokens_before: int
    """Of the answer, those that the client had when it began."""
    decoder_copes: bool
    """The decode leg computes a prompt that does not arrive by itself."""
    incarnations: dict[str, str]
    """Of the workers it was placed on."""
    open_legs: set[str] = field(init=False)
    _is_decoding: bool = False
    """The decode worker has said something, so it needs no prefill worker any more."""
    _lost_prompt: AttemptFailed | None = None
    """The decode worker says that its prompt will not come; why not, the prefill worker has yet to say."""
    _is_prefill_told: bool = False
    _counted_legs: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.open_legs = set(self.workers)
        self._counted_legs = set(self.workers)

    @property
    def workers(self) -> tuple[str, ...]:
        """The decode worker first."""
        prefill = self.placement.prefill
        return (self.placement.decode,) if prefill is None else (self.placement.decode, prefill)

    def take_ended_legs(self) -> list[str]:
        """The workers whose legs have ended since this was asked last: each is named once."""
        ended = sorted(self._counted_legs - self.open_legs)
        self._counted_legs &= self.open_legs
        return ended

    def close(self) -> list[str]:
        """Ends what is left; the workers that are to be told."""
        left = sorted(self.open_legs)
        self.open_legs.clear()
        return left

    def leg_to_abort(self) -> str | None:
        """A prefill worker that nobody waits for any more but to hear how its leg ended; once."""
        if self._lost_prompt is None or self._is_prefill_told:
            return None
        self._is_prefill_told = True
        return self.placement.prefill

    def note_loss(self, worker: str, reason: str, *, was_leaving: bool = False) -> None:
        """Nothing more comes from this worker; AttemptFailed if it is needed, and nothing if it is not (any more).

        What reaches one that `was_leaving` too late to be refused is lost with it, and is given back all the same.
        """
        is_prefill = worker == self.placement.prefill
        if is_prefill and self._is_decoding:
            self.open_legs.discard(worker)  # that it handed over was its last word, and may have been lost
            return
        # What a prefill worker has handed over, but nobody has seen arrive, may be lost with it.
        if worker not in self.open_legs and not is_prefill:
            return
        if is_prefill and self.decoder_copes and self.open_legs - {worker}:
            self.open_legs.discard(worker)
            return
        # Its leg stays open until the attempt is closed: if it hears us after all, it is told.
        if was_leaving:
            raise AttemptFailed(worker, Cause.GIVEN_BACK, "the worker has left", reason)
        raise AttemptFailed(worker, Cause.LOST, "the worker was lost", reason, is_prompt_lost=is_prefill)

    def take(self, worker: str, output: RequestOutput) -> bool:
        """Whether this output is for the client; AttemptFailed or InvalidRequest if it ends the attempt."""
        is_prefill = worker == self.placement.prefill
        if output.finish_reason is not None:
            self.open_legs.discard(worker)
        is_unhappy = output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        if is_prefill and self._is_decoding:
            return False  # the prompt has arrived, or was not needed; and its token was told by who decodes
        if is_prefill and self._lost_prompt is not None and output.finish_reason in _NO_REASONS:
            raise self._lost_prompt
        if output.finish_reason is FinishReason.ABORT and self.open_legs:
            return False  # if the prefill leg ends the request itself, it tells the decode leg, and then us
        if output.error_kind is ErrorKind.KV_LOAD_FAILED and self.placement.prefill in self.open_legs:
            # It may have given the request back, which is nobody's failure, and told the decode worker before us.
            self._lost_prompt = self._failure(is_prefill, output)
            return False
        if is_unhappy:
            is_coped_with = output.error_kind in (ErrorKind.INTERNAL, ErrorKind.GIVEN_BACK)
            if is_prefill and is_coped_with and self.decoder_copes and self.open_legs:
                return False
            raise self._failure(is_prefill, output)
        self._is_decoding |= not is_prefill
        return True

    def note_contradiction(self, worker: str) -> None:
        """It sampled another token than the client has: AttemptFailed, since the answer goes on behind that one."""
        raise AttemptFailed(worker, Cause.FAILED, "it sampled another token than the one that was delivered")

    def decode_times(self, worker: str, output: RequestOutput) -> StageTimes | None:
        """What the decode leg tells at its end, if this output is that."""
        is_last = worker == self.placement.decode and output.finish_reason is not None
        return output.stage_times if is_last else None

    def has_recomputed(self, times: StageTimes) -> bool:
        """Whether these say that the decode worker computed a prompt that another one was to compute."""
        return self.placement.prefill is not None and not times.transfer_bytes

    def check_under_way(self) -> None:
        """AttemptFailed if no leg is left, though the answer is not whole."""
        if not self.open_legs:
            raise AttemptFailed(self.placement.decode, Cause.FAILED, "no worker goes on with it")

    def _failure(self, is_prefill: bool, output: RequestOutput) -> AttemptFailed:
        """What an unhappy end of a leg means for the request; InvalidRequest is raised if it is its own fault."""
        reason, kind = output.error or f"ended with {output.finish_reason}", output.error_kind
        if kind is ErrorKind.INVALID_REQUEST:
            raise InvalidRequest(*_split_field(reason))
        is_prompt_lost = kind is ErrorKind.KV_LOAD_FAILED or (is_prefill and kind is ErrorKind.INTERNAL)
        is_prefills_fault = is_prefill or is_prompt_lost
        worker = self.placement.prefill if is_prefills_fault else None
        leg = "prefill" if is_prefill else "decode"
        return AttemptFailed(
            worker or self.placement.decode,
            CAUSES.get(kind, Cause.FAILED),
            f"the {leg} leg failed",
            reason,
            is_prompt_lost=is_prompt_lost,
        )


def legs(
    request: EngineRequest, attempt: Attempt, refs: dict[str, WorkerRef], transfer_id: str, number: int
) -> list[tuple[str, EngineRequest]]:
    """What each worker is told, in this order: the first to be told is the one that has to make room.

    (transfer_id, number) names the hand-over, if there is one; no two attempts have the same. A prefill worker that
    runs out of blocks computes its prompt again when it has some: the prompt is all that it has to do.
    """
    decode, prefill = attempt.placement.decode, attempt.placement.prefill
    if prefill is None:
        return [(decode, request)]
    on_failure = OnLoadFailure.RECOMPUTE if attempt.decoder_copes else OnLoadFailure.REPORT
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
