"""StageTimer: when each request reached which stage, derived only from plans, outputs and transfers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.request import FinishReason, RequestOutput, StageTimes
from baton.step import ReceivedKV, SchedulerOutput
from baton.transfer import TransferRecord
from kv_transfer.commands import BeginLoad, BeginSend


@dataclass(slots=True)
class _Marks:
    """Readings of this worker's clock; None: not reached yet."""

    client_id: str
    arrived: float
    first_scheduled: float | None = None
    transfer_began: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    received: ReceivedKV | None = None
    transfers: list[TransferRecord] = field(default_factory=list)


class StageTimer:
    """Records when requests reach a stage, and reports the times of their stages when they finish."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[str, _Marks] = {}
        self._handed_over: dict[str, tuple[_Marks, StageTimes]] = {}
        """Requests that have finished here, while their blocks wait to be released. The connector reports each of them
        once, when it frees the blocks; then the entry ends."""

    def arrived(self, request_id: str, client_id: str) -> None:
        self._marks[request_id] = _Marks(client_id, self._clock.now())

    def planned(self, plan: SchedulerOutput) -> None:
        """Notes that requests that are new to the runner leave the queue now, and which hand-overs begin now."""
        now = self._clock.now()
        for command in () if plan.kv_connector_metadata is None else plan.kv_connector_metadata.at_once:
            if isinstance(command, BeginSend | BeginLoad) and (marks := self._marks.get(command.request_id)):
                marks.transfer_began = now
        for request in plan.scheduled_new_reqs:
            marks = self._marks.get(request.request_id)
            if marks is not None and marks.first_scheduled is None:
                marks.first_scheduled = now

    def received(self, loads: Iterable[ReceivedKV]) -> None:
        for load in loads:
            marks = self._marks.get(load.request_id)
            if marks is not None:
                marks.received = load

    def transferred(self, records: Mapping[str, TransferRecord]) -> Iterator[tuple[str, RequestOutput]]:
        """Records ended hand-overs. Yields outputs, by client, for requests that had already finished here."""
        now = self._clock.now()
        for request_id, record in records.items():
            if marks := self._marks.get(request_id):
                marks.transfers.append(_since_arrival(record, marks, now))
            elif handed_over := self._handed_over.pop(request_id, None):
                marks, stages = handed_over
                transfers = (*stages.transfers, _since_arrival(record, marks, now))
                stages = replace(stages, transfers=transfers)
                yield marks.client_id, RequestOutput(request_id, 0, stage_times=stages)

    def produced(self, output: RequestOutput) -> StageTimes | None:
        """Call it once per output. Returns the stages so far for the first token, and all stages for the last
        output; then the request is forgotten."""
        marks = self._marks.get(output.request_id)
        if marks is None:
            return None
        is_first = marks.first_token is None and bool(output.token_ids)
        if marks.second_token is None and output.token_ids:
            self._mark_tokens(marks, len(output.token_ids))
        if output.finish_reason is None:
            return _stages(marks, self._clock.now(), None) if is_first else None
        del self._marks[output.request_id]
        stages = _stages(marks, self._clock.now(), output.finish_reason)
        if output.finish_reason is FinishReason.HANDED_OVER:
            self._handed_over[output.request_id] = marks, stages
        return stages

    def _mark_tokens(self, marks: _Marks, count: int) -> None:
        now = self._clock.now()
        if marks.first_token is None:
            marks.first_token = now
            count -= 1
        if count:
            marks.second_token = now


def _since_arrival(record: TransferRecord, marks: _Marks, now: float) -> TransferRecord:
    """The record, with times that count from the request's arrival. The hand-over may have ended a whole step before
    the engine takes its record, so the record does not end `now`. Instead, it begins at the time when the engine began
    the hand-over."""
    latest_s = max(0.0, now - marks.arrived - record.ended_s)
    began_s = latest_s if marks.transfer_began is None else marks.transfer_began - marks.arrived
    return record.shifted(min(began_s, latest_s))


def _stages(marks: _Marks, now: float, reason: FinishReason | None) -> StageTimes:
    """The times of all stages. Queue, transfer and prefill last to the first token, or, without a token, to the end."""
    is_whole = marks.first_token is not None
    until = now if marks.first_token is None else marks.first_token
    decode_s = now - until if reason is not FinishReason.HANDED_OVER else 0.0
    transfers = tuple(marks.transfers)
    if is_whole and marks.received is not None:
        load = marks.received
        return StageTimes(
            queue_s=max(0.0, until - marks.arrived - load.elapsed_s),
            transfer_s=load.elapsed_s,
            transfer_moving_s=load.moving_s,
            transfer_bytes=load.num_bytes,
            transport=load.transport,
            decode_s=decode_s,
            first_step_s=0.0 if marks.second_token is None else marks.second_token - until,
            transfers=transfers,
        )
    waited_s = (until if marks.first_scheduled is None else marks.first_scheduled) - marks.arrived
    transfer_s = min(waited_s, sum(record.elapsed_s for record in transfers))
    return StageTimes(
        queue_s=waited_s - transfer_s,
        prefill_s=until - marks.arrived - waited_s,
        transfer_s=transfer_s,
        transfer_moving_s=min(transfer_s, sum(record.moving_s for record in transfers)),
        decode_s=decode_s,
        transfers=transfers,
    )
