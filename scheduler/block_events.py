"""BlockEvents: changes of the prefix cache, for routers that follow it; knows no pool and no reader.

The number of unread events is bounded. Beyond the bound, one full listing replaces them. A reader can start again from
this listing. A reader that applies all events in order knows exactly the hashes that can be hit.
"""

from collections.abc import Callable, Iterable

from baton.kv import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent


class BlockEvents:
    """Collects events in order until they are taken; `snapshot` yields all hashes that can be hit now."""

    def __init__(self, max_pending: int, snapshot: Callable[[], Iterable[bytes]]) -> None:
        """`max_pending`: the most hashes that unread events may contain."""
        self._max_pending = max_pending
        self._snapshot = snapshot
        self._runs: list[tuple[type[BlocksStored] | type[BlocksRemoved], list[bytes]]] = []
        self._num_pending = 0
        self._was_cleared = False
        """The next `take_events` starts with `BlocksCleared`."""
        self._is_incomplete = False
        """Events were dropped: the next `take_events` returns a full listing instead."""

    def stored(self, block_hash: bytes) -> None:
        self._add(BlocksStored, block_hash)

    def removed(self, block_hash: bytes) -> None:
        self._add(BlocksRemoved, block_hash)

    def cleared(self) -> None:
        """Notes that the cache was emptied, and drops earlier events, which no longer matter."""
        self._drop_pending()
        self._was_cleared = True

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order; a full listing if some were dropped."""
        if self._is_incomplete:
            return self.full_listing()
        events: list[KVEvent] = [BlocksCleared()] if self._was_cleared else []
        events += [kind(tuple(block_hashes)) for kind, block_hashes in self._runs]
        self._drop_pending()
        return events

    def ignore(self) -> None:
        """Drops all events until the next full listing, so that they cost nothing while no reader takes them."""
        self._drop_pending()
        self._is_incomplete = True

    def full_listing(self) -> list[KVEvent]:
        """A full listing, from which the next `take_events` continues: first `BlocksCleared`, then all hashes."""
        self._drop_pending()
        self._is_incomplete = False
        return [BlocksCleared(), BlocksStored(tuple(self._snapshot()))]

    def _add(self, kind: type[BlocksStored] | type[BlocksRemoved], block_hash: bytes) -> None:
        if self._is_incomplete:
            return
        if self._num_pending == self._max_pending:
            self.ignore()
            return
        if not self._runs or self._runs[-1][0] is not kind:
            self._runs.append((kind, []))
        self._runs[-1][1].append(block_hash)
        self._num_pending += 1

    def _drop_pending(self) -> None:
        self._runs, self._num_pending, self._was_cleared = [], 0, False
