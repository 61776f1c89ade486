"""How long the parts of a request took: until the first token, then until the second, and in each stage; pure.

The clocks of two machines are never compared. Workers report durations. The gateway measures longer durations
that contain them, and counts the difference, which includes the network, as its own time.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from baton.request import StageTimes
from baton.transfer import TransferRecord
from gateway.routing.placement import Mode, Placement
from gateway.timing.latency_window import LatencyWindow


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a request and its parts took, in seconds; see Timing in generation_service.proto."""

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
    ttft_parts: "TtftParts | None" = None
    """Parts that add up to `ttft_s`; None if there was no token."""
    handover_parts: "HandoverParts | None" = None
    """Parts that add up to `handover_s`; None if nothing was handed over."""
    handover_ended_s: float = 0.0
    """Time from the request's arrival until the first token after the hand-over arrived."""
    attempt_began_s: float = 0.0
    """Time from the request's arrival until the latest attempt began."""
    num_tokens_before: int = 0
    """How many tokens earlier attempts delivered."""


@dataclass(frozen=True, slots=True)
class SeenTransfer:
    """A hand-over as one worker saw it; times count from the request's arrival at the gateway."""

    worker: str
    record: TransferRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftParts:
    """Parts of the time to first token, in seconds. Their sum is this time, and none is negative."""

    gateway_s: float
    """Preprocessing, dispatching, the network to the worker and back, and time that no worker reported."""
    queue_s: float
    """Time in the gateway's queue, until a worker had room."""
    failed_attempts_s: float
    """Time in attempts that failed before the first token."""
    worker_queue_s: float
    """Time in the queue of the worker that computed the prompt, until the first step."""
    transfer_exposed_s: float
    """Waiting for a KV transfer. Usually 0, since the prefill worker itself reports the first token. The
    value is larger if this report is lost, or arrives after the decode worker's report."""
    prefill_s: float
    """From the prompt's first step to the first token on that worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverParts:
    """The time from the last token before a hand-over to the first token after it, divided into parts, in seconds."""

    transfer_exposed_s: float
    """From the end of the prefill until the decode worker had all blocks. The rest of the transfer overlapped
    with the prefill."""
    first_step_s: float
    """From the arrival of all blocks until the decode worker sampled a token, including the wait for a place in its
    batch."""
    gateway_s: float
    """The network, and time that no worker reported."""


class RequestTimes:
    """Collects the times of one request. Every `now` is the gateway's clock."""

    def __init__(self, arrived_at: float, preprocess_s: float, window: LatencyWindow) -> None:
        """`window` collects the latencies of all requests, and also those of this request."""
        self._arrived_at = arrived_at
        self._window = window
        self._delivered_at = array("d")
        self._queue_s = self._failed_s = 0.0
        """Time in the queue and in failed attempts, until the first token."""
        self._waits_since_s = preprocess_s
        self._first_worker = ""
        """The worker that brought the first token."""
        self._first_placement: Placement | None = None
        """The placement of the attempt that brought the first token; until then, of the latest attempt."""
        self._first_stages: dict[str, StageTimes] = {}
        """Stages of the attempt that `_first_placement` belongs to, by worker."""
        self._stages: dict[str, StageTimes] = {}
        """Stages of the latest attempt, by worker."""
        self._attempt = 0
        self._attempt_began_s = 0.0
        self._transfers: dict[tuple[int, str], tuple[SeenTransfer, ...]] = {}
        """Hand-overs by attempt number and worker, including those of failed attempts."""

    @property
    def ttft_parts(self) -> TtftParts | None:
        """The parts of the time to first token; None before the first token."""
        if not self._delivered_at:
            return None
        assert self._first_placement is not None
        computed, waited_s = _stages_of_prompt(self._first_placement, self._first_worker, self._first_stages)
        ttft_s = self._delivered_at[0] - self._arrived_at
        return _divide_ttft(ttft_s, self._queue_s, self._failed_s, computed, waited_s)

    @property
    def transfers(self) -> tuple[SeenTransfer, ...]:
        """All reported hand-overs, in the order of the attempts."""
        return tuple(seen for part in self._transfers.values() for seen in part)

    def begin_attempt(self, number: int, placement: Placement, now: float) -> None:
        self._attempt, self._attempt_began_s = number, now - self._arrived_at
        self._stages = {}
        if not self._delivered_at:
            self._queue_s += self._attempt_began_s - self._waits_since_s
            self._first_placement, self._first_stages = placement, self._stages

    def end_attempt(self, now: float) -> None:
        """The attempt failed, and the request waits for another one."""
        if not self._delivered_at:
            self._waits_since_s = now - self._arrived_at
            self._failed_s += self._waits_since_s - self._attempt_began_s

    def note_stages(self, worker: str, stages: StageTimes) -> None:
        """A worker of the latest attempt reported its stages so far."""
        self._stages[worker] = stages
        self._transfers[self._attempt, worker] = tuple(
            SeenTransfer(worker, record.shifted(self._attempt_began_s)) for record in stages.transfers
        )

    def note_tokens(self, worker: str, num_tokens: int, now: float) -> None:
        """The client gets `num_tokens` tokens with an output of this worker."""
        if not num_tokens:
            return
        if self._delivered_at:
            self._window.next_tokens(now - self._delivered_at[-1], num_tokens, now)
        else:
            self._first_worker = worker
            self._window.first_token(now - self._arrived_at, now)
            if num_tokens > 1:
                self._window.next_tokens(0.0, num_tokens - 1, now)
        if num_tokens == 1:
            self._delivered_at.append(now)
        else:
            self._delivered_at.extend([now] * num_tokens)

    def timing(self, placement: Placement, num_tokens_before: int, now: float) -> Timing:
        """The request's times. `placement`, `num_tokens_before` and the workers' times are the latest
        attempt's."""
        at = self._delivered_at
        decode = self._stages.get(placement.decode, StageTimes())
        prefill = self._stages.get(placement.prefill, StageTimes()) if placement.prefill else decode
        gaps = tuple(after - before for before, after in pairwise(at))
        ttft_s = at[0] - self._arrived_at if at else now - self._arrived_at
        is_handed_over = placement.mode is Mode.DISAGGREGATED and len(gaps) > num_tokens_before
        handover_s = gaps[num_tokens_before] if is_handed_over else 0.0
        parts = split_handover(handover_s, decode, self._exposed_s(placement)) if is_handed_over else None
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
            total_s=now - self._arrived_at,
            ttft_parts=self.ttft_parts,
            handover_parts=parts,
            handover_ended_s=ttft_s + sum(gaps[: num_tokens_before + 1]) if is_handed_over else 0.0,
            attempt_began_s=self._attempt_began_s,
            num_tokens_before=num_tokens_before,
        )

    def _exposed_s(self, placement: Placement) -> float | None:
        """The prefill worker's exposed transfer time; None if it reported none."""
        seen = self._transfers.get((self._attempt, placement.prefill or ""), ())
        return next((each.record.exposed_s for each in seen if each.record.exposed_s > 0.0), None)


def split_handover(gap_s: float, stages: StageTimes, exposed_s: float | None) -> HandoverParts:
    """Splits `gap_s`, the time from the last token before a hand-over to the first token after it.

    `stages` are the decode worker's stage times. `exposed_s` is the exposed transfer time that the prefill
    worker reported, or None.
    """
    first_step_s = min(gap_s, stages.first_step_s)
    rest_s = gap_s - first_step_s
    transfer_exposed_s = rest_s if exposed_s is None else min(rest_s, exposed_s)
    return HandoverParts(
        transfer_exposed_s=transfer_exposed_s,
        first_step_s=first_step_s,
        gateway_s=rest_s - transfer_exposed_s,
    )


def _stages_of_prompt(
    placement: Placement, brought_by: str, stages: Mapping[str, StageTimes]
) -> tuple[StageTimes, float]:
    """The stage times of the worker that computed the prompt, and how long the other worker then waited for KV.

    The other worker's reported wait contains the time in which the prompt waited and was computed, so this time
    is subtracted.
    """
    first = stages.get(brought_by, StageTimes())
    if brought_by != placement.decode or placement.prefill is None or first.prefill_s:
        return first, first.transfer_s
    computed = stages.get(placement.prefill, StageTimes())
    return computed, first.transfer_s - computed.queue_s - computed.prefill_s


def _divide_ttft(
    ttft_s: float, queue_s: float, failed_s: float, computed: StageTimes, waited_s: float
) -> TtftParts:
    """Divides `ttft_s`. The gateway's measurements are subtracted first, then each reported time, but never
    more than remains. A negative time counts as 0."""
    rest_s = ttft_s - queue_s - failed_s
    fitting = []
    for reported_s in (computed.prefill_s, computed.queue_s, waited_s):
        fitting.append(min(rest_s, max(0.0, reported_s)))
        rest_s -= fitting[-1]
    prefill_s, worker_queue_s, transfer_exposed_s = fitting
    return TtftParts(
        gateway_s=rest_s,
        queue_s=queue_s,
        failed_attempts_s=failed_s,
        worker_queue_s=worker_queue_s,
        transfer_exposed_s=transfer_exposed_s,
        prefill_s=prefill_s,
    )
