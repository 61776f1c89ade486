"""Where the time to a request's first token went, and the time from there to the second; pure arithmetic on durations.

Clocks of two machines are never compared: what workers tell are durations of their own, which lie inside those that the
gateway measures. What is left over is the gateway's, with the ways between.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.request import StageTimes
from gateway.routing.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftParts:
    """In seconds, in the order in which they pass; they add up to the time to first token, and none is negative."""

    gateway_s: float
    """Taking the request in (tokenising), dispatching it, the ways to the worker and back, and what nobody told."""
    queue_s: float
    """In the gateway's line, until a worker had room."""
    failed_attempts_s: float
    """With workers that came to nothing before the first token."""
    worker_queue_s: float
    """On the worker that computed the prompt, until its first step."""
    transfer_exposed_s: float
    """Waiting for a KV transfer: nothing where the worker that computed the prompt tells the first token, as it does
    unless it or its word is lost, or comes later than that of the worker that goes on."""
    prefill_s: float
    """From the prompt's first step to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverParts:
    """Of a request that was handed over, in seconds; they add up to what lay between its first and second token."""

    transfer_exposed_s: float
    """From the end of the prefill until the decode worker had everything: what no overlap hid."""
    first_step_s: float
    """From there until the decode worker had sampled, waiting for a place in its batch included."""
    gateway_s: float
    """The ways between, and what nobody told."""


def split_handover(gap_s: float, stages: StageTimes, exposed_s: float | None) -> HandoverParts:
    """`gap_s` lay between the two tokens, `stages` are the decode worker's; `exposed_s` is what the prefill worker
    said, None if it did not."""
    first_step_s = min(gap_s, stages.first_step_s)
    left_s = gap_s - first_step_s
    transfer_exposed_s = left_s if exposed_s is None else min(left_s, exposed_s)
    return HandoverParts(
        transfer_exposed_s=transfer_exposed_s,
        first_step_s=first_step_s,
        gateway_s=left_s - transfer_exposed_s,
    )


@dataclass(slots=True)
class FirstTokenClock:
    """Told of one request's attempts and of its first token; times are since the request's arrival."""

    ttft_s: float | None = None
    """Once it has come."""
    _brought_by: str = ""
    _queue_s: float = 0.0
    _failed_s: float = 0.0
    _waits_since_s: float = 0.0
    _attempt_began_s: float | None = None
    _placement: Placement | None = None

    def waits_from(self, at_s: float) -> None:
        """It was taken in, and stands in line."""
        self._waits_since_s = at_s

    def begin_attempt(self, placement: Placement, at_s: float) -> None:
        if self.ttft_s is not None:
            return
        self.end_attempt(at_s)
        self._queue_s += at_s - self._waits_since_s
        self._attempt_began_s = at_s
        self._placement = placement

    def end_attempt(self, at_s: float) -> None:
        """It came to nothing; no error if there was none."""
        if self.ttft_s is None and self._attempt_began_s is not None:
            self._failed_s += at_s - self._attempt_began_s
            self._attempt_began_s, self._waits_since_s = None, at_s

    def first_token(self, worker: str, at_s: float) -> None:
        """Only the first call counts."""
        if self.ttft_s is None:
            self.ttft_s, self._brought_by = at_s, worker

    def parts(self, stages: Mapping[str, StageTimes]) -> TtftParts | None:
        """`stages` by worker, of the attempt that brought the first token; None if it has not come."""
        if self.ttft_s is None:
            return None
        assert self._placement is not None
        computed, waited_s = _who_computed(self._placement, self._brought_by, stages)
        return _cut(self.ttft_s, self._queue_s, self._failed_s, computed, waited_s)


def _who_computed(
    placement: Placement, brought_by: str, stages: Mapping[str, StageTimes]
) -> tuple[StageTimes, float]:
    """The times of the worker that computed the prompt, and how long another one waited for it when it was computed.

    That one has waited all along, from before the prompt's first step.
    """
    bringer = stages.get(brought_by, StageTimes())
    if brought_by != placement.decode or placement.prefill is None or bringer.prefill_s:
        return bringer, bringer.transfer_s
    computed = stages.get(placement.prefill, StageTimes())
    return computed, max(0.0, bringer.transfer_s - computed.queue_s - computed.prefill_s)


def _cut(ttft_s: float, queue_s: float, failed_s: float, computed: StageTimes, waited_s: float) -> TtftParts:
    """What was measured here comes first, then each that a worker told, as far as there is time left for it."""
    left_s = ttft_s - queue_s - failed_s
    told = []
    for said_s in (computed.prefill_s, computed.queue_s, waited_s):
        told.append(min(left_s, max(0.0, said_s)))
        left_s -= told[-1]
    prefill_s, worker_queue_s, transfer_exposed_s = told
    return TtftParts(
        gateway_s=left_s,
        queue_s=queue_s,
        failed_attempts_s=failed_s,
        worker_queue_s=worker_queue_s,
        transfer_exposed_s=transfer_exposed_s,
        prefill_s=prefill_s,
    )
