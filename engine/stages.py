"""StageTimes: when each request reached which stage, told from plans and outputs alone; knows no scheduler."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.clock import Clock
from baton.request import FinishReason, RequestOutput, StageTimes
from baton.step import ReceivedKV, SchedulerOutput


@dataclass(slots=True)
class _Marks:
    """Readings of this worker's clock; None: not reached yet."""

    arrived: float
    first_scheduled: float | None = None
    first_token: float | None = None
    received: ReceivedKV | None = None


class StageTimer:
    """Stamps requests as they move, and says where their time went when they finish."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[str, _Marks] = {}

    def arrived(self, request_id: str) -> None:
        self._marks[request_id] = _Marks(self._clock.now())

    def planned(self, plan: SchedulerOutput) -> None:
        """Requests the runner sees for the first time leave the queue now."""
        if not plan.scheduled_new_reqs:
            return
        now = self._clock.now()
        for request in plan.scheduled_new_reqs:
            marks = self._marks.get(request.request_id)
            if marks is not None and marks.first_scheduled is None:
                marks.first_scheduled = now

    def received(self, loads: Iterable[ReceivedKV]) -> None:
        for load in loads:
            marks = self._marks.get(load.request_id)
            if marks is not None:
                marks.received = load

    def produced(self, output: RequestOutput) -> StageTimes | None:
        """Call once per output; returns the stages with the last one and forgets the request."""
        marks = self._marks.get(output.request_id)
        if marks is None:
            return None
        if output.token_ids and marks.first_token is None:
            marks.first_token = self._clock.now()
        if output.finish_reason is None:
            return None
        del self._marks[output.request_id]
        return _stages(marks, self._clock.now(), output.finish_reason)


def _stages(marks: _Marks, now: float, reason: FinishReason) -> StageTimes:
    if marks.first_token is None:  # ended in the queue, in mid-prefill or in mid-transfer
        queue_s = (marks.first_scheduled or now) - marks.arrived
        return StageTimes(queue_s=queue_s, prefill_s=now - marks.arrived - queue_s)
    decode_s = 0.0 if reason is FinishReason.HANDED_OVER else now - marks.first_token
    waited_s = marks.first_token - marks.arrived
    if marks.received is not None:
        load = marks.received
        return StageTimes(
            queue_s=max(0.0, waited_s - load.elapsed_s),
            transfer_s=load.elapsed_s,
            transfer_moving_s=load.moving_s,
            transfer_bytes=load.num_bytes,
            transport=load.transport,
            decode_s=decode_s,
        )
    queue_s = (marks.first_scheduled or marks.first_token) - marks.arrived
    return StageTimes(queue_s=queue_s, prefill_s=waited_s - queue_s, decode_s=decode_s)
