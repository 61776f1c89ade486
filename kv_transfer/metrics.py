"""PeerMetrics: how much was handed over, with which peer and how; written by the transfer thread, read by any."""

import threading
from dataclasses import replace

from baton.kv import TransferRole
from baton.worker import KVPeerCounts

MAX_ROWS = 128
"""At most this many peers have a row of their own. The least recently used are summed up in one row."""

OTHERS = "(others)"
"""The name under which peers are summed up."""

_Place = tuple[TransferRole, str, str]
"""Our end, the peer's name, and the transport."""


class PeerMetrics:
    """Sums since the start, by our end, peer and transport."""

    def __init__(self) -> None:
        self._counts: dict[_Place, KVPeerCounts] = {}
        """Least recently used first."""
        self._others: dict[_Place, KVPeerCounts] = {}
        """Sums of peers that are no longer in `_counts`, by our end and transport."""
        self._lock = threading.Lock()
        self._snapshot: tuple[KVPeerCounts, ...] | None = ()

    def moved(self, role: TransferRole, peer: str, transport: str, num_bytes: int) -> None:
        """Counts bytes sent, offered to be read, or received."""
        self._add(replace(_nothing(role, peer, transport), num_bytes=num_bytes))

    def sent(self, peer: str, transport: str, exposed_s: float | None, is_needed: bool) -> None:
        """Counts a rank transfer sent: released `exposed_s` after its prefill, or, if None, ended in another way."""
        nothing = _nothing(TransferRole.PRODUCER, peer, transport)
        if exposed_s is not None:
            self._add(replace(nothing, done=1, exposed_s=exposed_s))
        else:
            self._add(replace(nothing, failed=int(is_needed), not_needed=int(not is_needed)))

    def received(self, peer: str, transport: str, queued_s: float, moving_s: float) -> None:
        """Counts a rank transfer that arrived: the time before its first piece, and the time since."""
        nothing = _nothing(TransferRole.CONSUMER, peer, transport)
        self._add(replace(nothing, done=1, queued_s=queued_s, moving_s=moving_s))

    def missed(self, peer: str, transport: str, is_needed: bool) -> None:
        """Counts a rank transfer whose load failed, or, if it is not needed, whose request ended."""
        nothing = _nothing(TransferRole.CONSUMER, peer, transport)
        self._add(replace(nothing, failed=int(is_needed), not_needed=int(not is_needed)))

    def snapshot(self) -> tuple[KVPeerCounts, ...]:
        """The current sums; the same tuple until something changes."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = (*self._counts.values(), *self._others.values())
            return self._snapshot

    def _add(self, counts: KVPeerCounts) -> None:
        with self._lock:
            self._snapshot = None
            _add_to(self._counts, counts)
            if len(self._counts) > MAX_ROWS:  # sum up the oldest
                oldest = self._counts.pop(next(iter(self._counts)))
                _add_to(self._others, replace(oldest, peer=OTHERS))


def _nothing(role: TransferRole, peer: str, transport: str) -> KVPeerCounts:
    return KVPeerCounts(role, peer, transport, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def _add_to(rows: dict[_Place, KVPeerCounts], counts: KVPeerCounts) -> None:
    """Adds to a row, which becomes the last."""
    place = counts.role, counts.peer, counts.transport
    known = rows.pop(place, None)
    rows[place] = counts if known is None else known + counts
