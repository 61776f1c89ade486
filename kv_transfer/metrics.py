"""PeerMetrics: how much was handed over, with which peer and how; written by the transfer thread, read by any."""

import threading
from dataclasses import dataclass, field, fields

from baton.kv import TransferRole
from baton.worker import KVPeerCounts

MAX_ROWS = 128
"""Limit of rows kept per peer; beyond it, the least recently used peers are summed up, since peers come and go."""

OTHERS = "(others)"
"""The name under which peers are summed up."""

_Place = tuple[TransferRole, str, str]
"""Our end, the peer's name, and the transport."""


@dataclass(slots=True)
class _Counts:
    done: int = 0
    failed: int = 0
    not_needed: int = 0
    num_bytes: int = 0
    queued_s: float = 0.0
    moving_s: float = 0.0
    exposed_s: float = 0.0

    def add(self, other: "_Counts") -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class PeerMetrics:
    """Sums since the start, by our end, peer and transport."""

    _counts: dict[_Place, _Counts] = field(default_factory=dict)
    _others: dict[_Place, _Counts] = field(default_factory=dict)
    """Sums of peers that are no longer in `_counts`, by our end and transport."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _snapshot: tuple[KVPeerCounts, ...] | None = ()

    def moved(self, role: TransferRole, peer: str, transport: str, num_bytes: int) -> None:
        """Counts bytes sent, offered to be read, or received."""
        with self._lock:
            self._of(role, peer, transport).num_bytes += num_bytes

    def given(self, peer: str, transport: str, exposed_s: float | None, is_needed: bool) -> None:
        """Counts a rank transfer sent: released `exposed_s` after its prefill, or, if None, ended in another way."""
        with self._lock:
            counts = self._of(TransferRole.PRODUCER, peer, transport)
            if exposed_s is not None:
                counts.done += 1
                counts.exposed_s += exposed_s
            else:
                _miss(counts, is_needed)

    def taken(self, peer: str, transport: str, queued_s: float, moving_s: float) -> None:
        """Counts a rank transfer that arrived: the time before its first piece, and the time since."""
        with self._lock:
            counts = self._of(TransferRole.CONSUMER, peer, transport)
            counts.done += 1
            counts.queued_s += queued_s
            counts.moving_s += moving_s

    def missed(self, peer: str, transport: str, is_needed: bool) -> None:
        """Counts a rank transfer whose load failed, or, if it is not needed, whose request ended."""
        with self._lock:
            _miss(self._of(TransferRole.CONSUMER, peer, transport), is_needed)

    def snapshot(self) -> tuple[KVPeerCounts, ...]:
        """The current sums; the same tuple until something changes."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = tuple(
                    KVPeerCounts(
                        role,
                        peer,
                        transport,
                        counts.done,
                        counts.failed,
                        counts.not_needed,
                        counts.num_bytes,
                        counts.queued_s,
                        counts.moving_s,
                        counts.exposed_s,
                    )
                    for (role, peer, transport), counts in (*self._counts.items(), *self._others.items())
                )
            return self._snapshot

    def _of(self, role: TransferRole, peer: str, transport: str) -> _Counts:
        self._snapshot = None
        place = (role, peer, transport)
        counts = self._counts.pop(place, None) or _Counts()
        self._counts[place] = counts  # last in the dict: most recently used
        if len(self._counts) > MAX_ROWS:
            self._sum_up_oldest()
        return counts

    def _sum_up_oldest(self) -> None:
        """Sums up the oldest row into that of its end and transport, of which there are few."""
        place = next(iter(self._counts))
        role, _, transport = place
        others = self._others.setdefault((role, OTHERS, transport), _Counts())
        others.add(self._counts.pop(place))


def _miss(counts: _Counts, is_needed: bool) -> None:
    if is_needed:
        counts.failed += 1
    else:
        counts.not_needed += 1
