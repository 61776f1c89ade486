"""Records of hand-overs: sums by peer and transport since the start, and the times of each hand-over's events.

Knows no message and no byte. The transfer thread writes; any thread reads the sums.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.kv import KVTransferParams, TransferRole
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from baton.worker import KVPeerCounts

MAX_ROWS = 128
"""The most rows of sums. The least recently used rows are forgotten; if such a row is needed again, it begins at 0."""

_Place = tuple[TransferRole, str, str]
"""Our end, the peer's name, and the transport."""


class PeerMetrics:
    """Sums since the start, by our end, peer and transport."""

    def __init__(self) -> None:
        self._counts: dict[_Place, KVPeerCounts] = {}
        """Least recently used first."""
        self._lock = threading.Lock()
        self._snapshot: tuple[KVPeerCounts, ...] | None = ()

    def moved(self, role: TransferRole, peer: str, transport: str, num_bytes: int) -> None:
        """Counts bytes sent, offered to be read, or received."""
        self._add(KVPeerCounts(role, peer, transport, num_bytes=num_bytes))

    def sent(self, peer: str, transport: str, exposed_s: float | None, is_needed: bool) -> None:
        """Counts a producer's rank transfer. `exposed_s`: from the prefill's end to the release; None: not released."""
        place = TransferRole.PRODUCER, peer, transport
        if exposed_s is not None:
            self._add(KVPeerCounts(*place, done=1, exposed_s=exposed_s))
        else:
            self._add(KVPeerCounts(*place, failed=int(is_needed), not_needed=int(not is_needed)))

    def received(self, peer: str, transport: str, queued_s: float, moving_s: float) -> None:
        """Counts a rank transfer that arrived: the time before its first piece, and the time since."""
        place = TransferRole.CONSUMER, peer, transport
        self._add(KVPeerCounts(*place, done=1, queued_s=queued_s, moving_s=moving_s))

    def missed(self, peer: str, transport: str, is_needed: bool) -> None:
        """Counts a rank transfer whose load failed; with `is_needed` false, one whose request ended first."""
        place = TransferRole.CONSUMER, peer, transport
        self._add(KVPeerCounts(*place, failed=int(is_needed), not_needed=int(not is_needed)))

    def snapshot(self) -> tuple[KVPeerCounts, ...]:
        """The current sums; the same tuple until something changes."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = tuple(self._counts.values())
            return self._snapshot

    def _add(self, counts: KVPeerCounts) -> None:
        with self._lock:
            self._snapshot = None
            place = counts.role, counts.peer, counts.transport
            known = self._counts.pop(place, None)
            self._counts[place] = counts if known is None else known + counts  # the last row now
            if len(self._counts) > MAX_ROWS:
                # The dropped row is not added to another row: a rate computed from that other row would jump.
                del self._counts[next(iter(self._counts))]


ENDS = (
    TransferEventKind.VERIFIED,
    TransferEventKind.RELEASED,
    TransferEventKind.NOT_NEEDED,
    TransferEventKind.FAILED,
)
"""The ways in which a part can end, from the best to the worst. A hand-over ends in the worst way of its parts."""


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

    def begin(self, request_id: str, transfer: KVTransferParams, began_at: float | None = None) -> None:
        """Starts a timeline; `conclude` or `forget` must follow. `began_at`: when the engine began the hand-over;
        None: now."""
        began_at = self._clock.now() if began_at is None else began_at
        self._timelines[request_id] = _Timeline(
            transfer, began_at, [TransferEvent(TransferEventKind.BEGUN, 0.0)]
        )

    def mark(self, request_id: str, kind: TransferEventKind) -> None:
        """Records an event now; repetitions are ignored."""
        timeline = self._timelines.get(request_id)
        if timeline is not None and all(event.kind is not kind for event in timeline.events):
            timeline.events.append(TransferEvent(kind, self._clock.now() - timeline.began_at))

    def moved(self, request_id: str, transport: str, num_bytes: int) -> None:
        """Counts bytes of pieces sent, offered or received."""
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

    def conclude(self, request_id: str) -> dict[str, TransferRecord]:
        """Call it when all rank transfers have ended. Returns the record by request; empty for an unknown request."""
        timeline = self._timelines.get(request_id)
        if timeline is None:
            return {}
        assert timeline.end is not None, f"{request_id} has not ended"
        self.mark(request_id, timeline.end)
        del self._timelines[request_id]
        record = TransferRecord(
            role=timeline.transfer.role,
            peer=timeline.transfer.peer.name,
            attempt=timeline.transfer.attempt,
            transport=timeline.transport,
            num_bytes=timeline.num_bytes,
            events=tuple(timeline.events),
            reason=timeline.reason,
            is_link_failure=timeline.is_link_failure,
        )
        return {request_id: record}

    def forget(self, request_id: str) -> None:
        """Drops a timeline that will not be reported."""
        self._timelines.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._timelines)


def combine(records: Iterable[TransferRecord]) -> TransferRecord:
    """One record for all ranks. PREFILLED and the end have the last rank's time, other events the first rank's."""
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
        transport=worst.transport or next((part.transport for part in parts if part.transport), ""),
        num_bytes=sum(part.num_bytes for part in parts),
        events=(*events, end),
        is_link_failure=any(part.is_link_failure for part in parts),
    )
