"""ConnectionPlaces: counts connections, and says which one to close when a new one needs room; no I/O.

A connection belongs to a stranger until a caller with a key has sent a request on it. Strangers are counted
by address, callers by name. While places are free, no client is limited. When no place is free, a new
connection replaces an idle connection of the address or caller that has the most connections. So a client
that opens many connections displaces its own.
"""

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

from baton.errors import Overloaded

Connection = TypeVar("Connection")

IPV6_PREFIX = 64
"""Providers give one subscriber a network of this prefix length, so all addresses in it count as one
address."""

_UNKNOWN = ""
"""In place of the name of a caller that is not known yet."""

_Groups = dict[str, dict[Connection, None]]
"""Connections by address or by caller's name. In each group, the connection that was served longest ago is
first."""


class ConnectionPlaces(Generic[Connection]):
    """Belongs to one event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_reserved = number // 4
        """The running requests of one caller leave this many places to other clients. While strangers have at most this
        many connections, a new connection first displaces an idle connection of a caller. If strangers have more
        connections, a new connection first displaces an idle connection of a stranger. So a caller can always connect
        and show its key."""
        self._strangers: _Groups[Connection] = {}
        self._callers: _Groups[Connection] = {}
        self._group_of: dict[Connection, tuple[_Groups[Connection], str]] = {}
        self._num_strangers = 0
        self._busy: dict[Connection, str] = {}
        """Connections that have a running request, with the name of the request's caller."""
        self._num_busy: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.number

    def enter(self, connection: Connection, address: str) -> None:
        """Adds a new connection. It belongs to a stranger, who is counted by `address`."""
        self._add_to_group(connection, self._strangers, network_of(address))

    def begin_request(self, connection: Connection, caller: str, *, is_stranger: bool) -> None:
        """A request of this caller begins. `is_stranger`: the gateway has keys, but the caller showed none.
        Raises Overloaded if the caller's requests run on all connections except the reserved ones."""
        if connection not in self._group_of:
            return  # the connection was refused or displaced
        self.end_request(connection)
        if self._num_busy[caller] >= self.number - self.num_reserved:
            raise Overloaded(
                f"requests of '{caller}' run on {self._num_busy[caller]} of {self.number} connections, and the other "
                "connections are kept for other callers",
                retry_after_s=1.0,
            )
        self._busy[connection] = caller
        self._num_busy[caller] += 1
        groups, key = (self._callers, caller) if not is_stranger else self._group_of[connection]
        self._remove_from_group(connection)
        self._add_to_group(connection, groups, key)

    def hold(self, connection: Connection) -> None:
        """A request has arrived, but its caller is not known yet: the connection is not idle."""
        if connection in self._group_of and connection not in self._busy:
            self._busy[connection] = _UNKNOWN
            self._num_busy[_UNKNOWN] += 1

    def end_request(self, connection: Connection) -> None:
        """The connection has no running request any more. May be called more than once."""
        if (caller := self._busy.pop(connection, None)) is not None:
            self._num_busy[caller] -= 1
            if not self._num_busy[caller]:
                del self._num_busy[caller]

    def leave(self, connection: Connection) -> None:
        """Removes the connection. May be called more than once."""
        self.end_request(connection)
        if connection in self._group_of:
            self._remove_from_group(connection)

    def victim(self) -> Connection | None:
        """The idle connection to close for a new one; None if every connection has a running request."""
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

    def _add_to_group(self, connection: Connection, groups: _Groups[Connection], key: str) -> None:
        groups.setdefault(key, {})[connection] = None
        self._group_of[connection] = (groups, key)
        self._num_strangers += groups is self._strangers

    def _remove_from_group(self, connection: Connection) -> None:
        groups, key = self._group_of.pop(connection)
        del groups[key][connection]
        if not groups[key]:
            del groups[key]
        self._num_strangers -= groups is self._strangers


def network_of(address: str) -> str:
    """The network whose addresses count as one: a single IPv4 address, or an IPv6 network."""
    if ":" not in address:
        return address
    host = address.partition("%")[0]  # without a zone
    return str(ipaddress.IPv6Network((host, IPV6_PREFIX), strict=False))
