"""ConnectionPlaces: who holds the places for connections, and which connection makes room for a new one; pure.

A connection is a stranger's until a caller with a key has sent a request on it. Strangers count by address, callers by
name. While places are free, nobody is limited. Once none is, a new connection replaces an idle one of the address, or
of the caller, that holds the most. So whoever opens many connections displaces its own.
"""

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

from baton.errors import Overloaded

Connection = TypeVar("Connection")

IPV6_PREFIX = 64
"""What one subscriber gets: all addresses in it count as one."""

_Groups = dict[str, dict[Connection, None]]
"""By address or by name; in each, the one that was served longest ago comes first."""


class ConnectionPlaces(Generic[Connection]):
    """Belongs to one event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_reserved = number // 4
        """One caller's running requests never take these places. Idle connections of callers leave them to new ones,
        so that a caller with a key can connect and show it."""
        self._strangers: _Groups[Connection] = {}
        self._callers: _Groups[Connection] = {}
        self._group_of: dict[Connection, tuple[_Groups[Connection], str]] = {}
        self._num_strangers = 0
        self._busy: dict[Connection, str] = {}
        """Connections with a running request, and its caller."""
        self._num_busy: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.number

    def enter(self, connection: Connection, address: str) -> None:
        """It is a stranger's."""
        self._join(connection, self._strangers, network_of(address))

    def serve(self, connection: Connection, caller: str, *, is_stranger: bool) -> None:
        """A request of this caller begins. `is_stranger`: it showed no key, to a gateway that has keys. Overloaded if
        its requests run on all connections but the reserved ones."""
        if connection not in self._group_of:
            return  # it was refused, or displaced
        self.rest(connection)
        if self._num_busy[caller] >= self.number - self.num_reserved:
            raise Overloaded(
                f"requests of '{caller}' run on {self._num_busy[caller]} of {self.number} connections, and the rest "
                "is kept for others",
                retry_after_s=1.0,
            )
        self._busy[connection] = caller
        self._num_busy[caller] += 1
        groups, key = (self._callers, caller) if not is_stranger else self._group_of[connection]
        self._part(connection)
        self._join(connection, groups, key)

    def rest(self, connection: Connection) -> None:
        """It has no running request any more; may be called again."""
        if (caller := self._busy.pop(connection, None)) is not None:
            self._num_busy[caller] -= 1
            if not self._num_busy[caller]:
                del self._num_busy[caller]

    def leave(self, connection: Connection) -> None:
        """May be called again."""
        self.rest(connection)
        if connection in self._group_of:
            self._part(connection)

    def victim(self) -> Connection | None:
        """The idle connection that makes room for a new one; None if requests run on all of them."""
        order = [self._callers, self._strangers]
        if self._num_strangers > self.num_reserved:
            order.reverse()
        return next((found for groups in order if (found := self._idle_of_largest(groups)) is not None), None)

    def _idle_of_largest(self, groups: _Groups[Connection]) -> Connection | None:
        for group in sorted(groups.values(), key=len, reverse=True):
            for connection in group:
                if connection not in self._busy:
                    return connection
        return None

    def _join(self, connection: Connection, groups: _Groups[Connection], key: str) -> None:
        groups.setdefault(key, {})[connection] = None
        self._group_of[connection] = (groups, key)
        self._num_strangers += groups is self._strangers

    def _part(self, connection: Connection) -> None:
        groups, key = self._group_of.pop(connection)
        del groups[key][connection]
        if not groups[key]:
            del groups[key]
        self._num_strangers -= groups is self._strangers


def network_of(address: str) -> str:
    """What counts as one address."""
    if ":" not in address:
        return address
    host = address.partition("%")[0]  # without a zone
    return str(ipaddress.IPv6Network((host, IPV6_PREFIX), strict=False))
