"""A request's stages in order, as a tree, made from its record; uses no clock and no tracing library.

Times count from the request's arrival at the gateway. Workers' times count from the moment when the gateway
sent the request to the worker, so the clocks of two machines are never compared.
"""

from dataclasses import dataclass, field

from baton.kv import TransferRole
from baton.transfer import TransferEventKind, TransferRecord
from gateway.requests.attempt import Attempt
from gateway.requests.record import RequestRecord
from gateway.timing.request_times import SeenTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStage:
    """A stage and its duration."""

    name: str
    began_s: float
    ended_s: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    events: tuple[tuple[str, float], ...] = ()
    failure: str | None = None
    """The gateway's description of the failure, without the worker's reason."""
    inside: "list[TimelineStage]" = field(default_factory=list)


def stages_of(record: RequestRecord) -> list[TimelineStage]:
    """The stage `preprocess`, then for each attempt the stages `queue` and `attempt`."""
    total_s = record.ended_at - record.arrived_at
    stages = [TimelineStage(name="preprocess", began_s=0.0, ended_s=min(record.preprocess_s, total_s))]
    at_s = stages[0].ended_s
    for attempt in record.attempts:
        began_s = attempt.began_at - record.arrived_at
        ended_s = total_s if attempt.ended_at is None else attempt.ended_at - record.arrived_at
        stages.append(TimelineStage(name="queue", began_s=at_s, ended_s=began_s))
        stages.append(_attempt(record, attempt, began_s, ended_s))
        at_s = ended_s
    if not record.attempts or record.attempts[-1].failure is not None:
        stages.append(TimelineStage(name="queue", began_s=at_s, ended_s=total_s))
    return stages


def _attempt(record: RequestRecord, attempt: Attempt, began_s: float, ended_s: float) -> TimelineStage:
    placement, failure = attempt.placement, attempt.failure
    attributes: dict[str, str | int | float] = {
        "baton.attempt.id": attempt.engine_request_id,
        "baton.attempt.number": attempt.number,
        "baton.attempt.mode": placement.mode.value,
        "baton.worker.decode": placement.decode,
    }
    if placement.prefill is not None:
        attributes["baton.worker.prefill"] = placement.prefill
    if failure is not None:
        attributes |= {"baton.attempt.failed_worker": failure.worker, "error.type": failure.cause.value}
    transfers = [seen for seen in record.transfers if seen.record.attempt == attempt.number]
    return TimelineStage(
        name="attempt",
        began_s=began_s,
        ended_s=ended_s,
        attributes=attributes,
        failure=None if failure is None else failure.summary,
        inside=[
            *_until_first_token(record, transfers, began_s, ended_s),
            *map(_transfer, transfers),
            *_decode(record, attempt, began_s, ended_s),
        ],
    )


def _until_first_token(
    record: RequestRecord, transfers: list[SeenTransfer], began_s: float, ended_s: float
) -> list[TimelineStage]:
    """The stages until the first token; none if another attempt brought this token. If a load failed, the decode worker
    first waited for this load and then computed the prompt, so the stages begin after the wait. Otherwise, a wait for a
    load comes after these stages."""
    parts, ttft_s = record.ttft_parts, record.ttft_s
    if parts is None or ttft_s is None or not began_s < ttft_s <= ended_s:
        return []
    has_failed_load = any(
        seen.record.role is TransferRole.CONSUMER and _is_failed(seen.record) for seen in transfers
    )
    queue_began_s = began_s + (parts.transfer_exposed_s if has_failed_load else 0.0)
    prefill_began_s = queue_began_s + parts.worker_queue_s
    return [
        TimelineStage(name="worker_queue", began_s=queue_began_s, ended_s=prefill_began_s),
        TimelineStage(name="prefill", began_s=prefill_began_s, ended_s=prefill_began_s + parts.prefill_s),
    ]


def _transfer(seen: SeenTransfer) -> TimelineStage:
    record = seen.record
    return TimelineStage(
        name=f"transfer {record.role.value}",
        began_s=record.events[0].at_s,
        ended_s=record.ended_s,
        attributes={
            "baton.worker": seen.worker,
            "baton.transfer.peer": record.peer,
            "baton.transfer.transport": record.transport,
            "baton.transfer.bytes": record.num_bytes,
            "baton.transfer.exposed_s": record.exposed_s,
            "baton.transfer.moving_s": record.moving_s,
        },
        events=tuple((event.kind.value, event.at_s) for event in record.events),
        failure="the prompt's KV cache did not arrive" if _is_failed(record) else None,
    )


def _is_failed(record: TransferRecord) -> bool:
    return record.events[-1].kind is TransferEventKind.FAILED


def _decode(record: RequestRecord, attempt: Attempt, began_s: float, ended_s: float) -> list[TimelineStage]:
    """The time from the first token to the attempt's end; the time of the whole attempt if an earlier attempt brought
    the first token."""
    ttft_s = record.ttft_s
    if ttft_s is None or ttft_s > ended_s:
        return []
    inside = []
    finish = record.finish
    is_last = attempt is record.attempts[-1]
    if is_last and finish is not None and (parts := finish.timing.handover_parts) is not None:
        at_s = finish.timing.handover_ended_s
        inside.append(
            TimelineStage(name="first_decode_step", began_s=at_s - parts.first_step_s, ended_s=at_s)
        )
    return [TimelineStage(name="decode", began_s=max(began_s, ttft_s), ended_s=ended_s, inside=inside)]
