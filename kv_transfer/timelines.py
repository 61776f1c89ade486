"""Timelines: the times of each hand-over's events at one end, until it has ended; knows no message and no byte."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.kv import KVTransferParams
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord

ENDS = (
    TransferEventKind.VERIFIED,
    TransferEventKind.RELEASED,
    TransferEventKind.NOT_NEEDED,
    TransferEventKind.FAILED,
)
"""How a part can end, and so the whole hand-over: the last of these wins."""


@dataclass(slots=True)
class _Timeline:
    transfer: KVTransferParams
    began_at: float
    events: list[TransferEvent] = field(default_factory=list)
    transport: str = ""
    num_bytes: int = 0
    end: TransferEventKind | None = None
    reason: str = ""
    is_link_failure: bool = False


class Timelines:
    """Timelines by request. Events of an unknown request change nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timelines: dict[str, _Timeline] = {}

    def begin(self, request_id: str, transfer: KVTransferParams) -> None:
        """Starts a timeline; `conclude` or `forget` must follow."""
        self._timelines[request_id] = _Timeline(transfer, self._clock.now())
        self.mark(request_id, TransferEventKind.BEGUN)

    def mark(self, request_id: str, kind: TransferEventKind) -> None:
        """Records an event now; only its first time counts."""
        timeline = self._timelines.get(request_id)
        if timeline is not None and all(event.kind is not kind for event in timeline.events):
            timeline.events.append(TransferEvent(kind, self._clock.now() - timeline.began_at))

    def moved(self, request_id: str, transport: str, num_bytes: int) -> None:
        """Counts pieces sent or offered."""
        if timeline := self._timelines.get(request_id):
            timeline.transport = transport
            timeline.num_bytes += num_bytes

    def part_ended(
        self,
        request_id: str,
        kind: TransferEventKind,
        transport: str = "",
        reason: str = "",
        *,
        is_link_failure: bool = False,
    ) -> None:
        """Records the end of one rank transfer, in one of the ways of ENDS."""
        timeline = self._timelines.get(request_id)
        if timeline is None:
            return
        timeline.transport = transport or timeline.transport
        timeline.is_link_failure |= is_link_failure
        if timeline.end is None or ENDS.index(kind) > ENDS.index(timeline.end):
            timeline.end, timeline.reason = kind, reason

    def conclude(self, request_id: str) -> TransferRecord | None:
        """All rank transfers have ended: returns the record, or None for an unknown request."""
        timeline = self._timelines.get(request_id)
        if timeline is None:
            return None
        assert timeline.end is not None, f"{request_id} has not ended"
        self.mark(request_id, timeline.end)
        del self._timelines[request_id]
        return TransferRecord(
            role=timeline.transfer.role,
            peer=timeline.transfer.peer.name,
            attempt=timeline.transfer.attempt,
            transport=timeline.transport,
            num_bytes=timeline.num_bytes,
            events=tuple(timeline.events),
            reason=timeline.reason,
            is_link_failure=timeline.is_link_failure,
        )

    def forget(self, request_id: str) -> None:
        """Drops a timeline that will not be reported."""
        self._timelines.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._timelines)


def combine(records: Iterable[TransferRecord]) -> TransferRecord:
    """One record for all ranks: an event begins with the first of them, and ends with the last."""
    parts = tuple(records)
    worst = max(parts, key=lambda part: ENDS.index(part.events[-1].kind))
    times: dict[TransferEventKind, list[float]] = {}
    for event in (event for part in parts for event in part.events if event.kind not in ENDS):
        times.setdefault(event.kind, []).append(event.at_s)
    events = [
        TransferEvent(kind, max(at) if kind is TransferEventKind.PREFILLED else min(at))
        for kind, at in times.items()
    ]
    events.sort(key=lambda event: event.at_s)
    end = TransferEvent(worst.events[-1].kind, max(part.ended_s for part in parts))
    return replace(
        worst,
        num_bytes=sum(part.num_bytes for part in parts),
        events=(*events, end),
        is_link_failure=any(part.is_link_failure for part in parts),
    )
