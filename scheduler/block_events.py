"""BlockEvents: changes of the prefix cache, for routers that follow it; knows no pool and no reader.

The number of unread events is bounded. Beyond the bound, one full listing replaces them. A reader can start again from
this listing. A reader that applies all events in order knows exactly the hashes that can be hit.
"""

from collections.abc import Callable, Iterable

from baton.kv import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent


class BlockEvents:
    """Collects events in order until they are taken; `snapshot` yields all hashes that can be hit now."""

    def __init__(self, max_pending: int, snapshot: Callable[[], Iterable[bytes]]) -> None:
        """`max_pending` bounds the hashes of unread events."""
        self._max_pending = max_pending
        self._snapshot = snapshot
        self._runs: list[tuple[type[BlocksStored] | type[BlocksRemoved], list[bytes]]] = []
        self._num_pending = 0
        self._is_anew = False
        """The next `take_events` starts with `BlocksCleared`."""
        self._is_overrun = False
        self._is_ignored = False

    def stored(self, block_hash: bytes) -> None:
        self._add(BlocksStored, block_hash)

    def removed(self, block_hash: bytes) -> None:
        self._add(BlocksRemoved, block_hash)

    def cleared(self) -> None:
        """Notes that the cache was emptied, and drops earlier events, which no longer matter."""
        self._drop_pending()
        self._is_anew, self._is_overrun = True, False

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        events: list[KVEvent] = [BlocksCleared()] if self._is_anew else []
        events += [kind(tuple(block_hashes)) for kind, block_hashes in self._runs]
        is_overrun = self._is_overrun
        self._drop_pending()
        self._is_anew = self._is_overrun = False
        return self.account() if is_overrun else events

    def ignore(self) -> None:
        """Drops all events until `begin` is called: no reader takes them before."""
        self._is_ignored = True
        self._drop_pending()

    def begin(self) -> list[KVEvent]:
        """A full listing, from which the next `take_events` continues."""
        self._is_ignored = self._is_anew = self._is_overrun = False
        self._drop_pending()
        return self.account()

    def account(self) -> list[KVEvent]:
        """A full listing, for a reader that missed events: first `BlocksCleared`, then all hashes."""
        return [BlocksCleared(), BlocksStored(tuple(self._snapshot()))]

    def _add(self, kind: type[BlocksStored] | type[BlocksRemoved], block_hash: bytes) -> None:
        if self._is_overrun or self._is_ignored:
            return
        if self._num_pending == self._max_pending:
            self._drop_pending()
            self._is_overrun = True
            return
        if not self._runs or self._runs[-1][0] is not kind:
            self._runs.append((kind, []))
        self._runs[-1][1].append(block_hash)
        self._num_pending += 1

    def _drop_pending(self) -> None:
        self._runs, self._num_pending = [], 0
