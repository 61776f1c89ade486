"""Caller: the identity behind a call, and its rights."""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from baton.config import ANONYMOUS


class Right(Enum):
    """A right that a call may require. The scopes of an API key grant rights."""

    GENERATE = "generate"
    """Send requests."""
    OBSERVE = "observe"
    """Read metrics and the state of the fleet, without addresses."""
    ADMINISTER = "administer"
    """Drain and restart workers, change their roles, and see addresses."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind a call. The authenticator finds it by the call's key."""

    name: str
    """All calls of one name belong to one caller, for the fair shares of a gateway."""
    rights: frozenset[Right] = frozenset({Right.GENERATE})
    is_stranger: bool = False
    """The caller sent no key to a gateway that has keys. At the limit of HTTP connections, idle connections of
    strangers are closed first if strangers have more than a quarter of the connections (ConnectionPlaces)."""
    requests_per_minute: int | None = None
    """Limit at this gateway. None: the caller's key sets no limit."""
    tokens_per_minute: int | None = None
    """Limit at this gateway. None: the caller's key sets no limit."""
    max_concurrent: int | None = None
    """Limit at this gateway. None: the caller's key sets no limit."""
    best_priority: int | None = None
    """The best priority that the caller's requests can have; None means any priority."""

    @property
    def number(self) -> int:
        """Identifies the caller to workers, which do not need its name; the same number at every gateway."""
        return int.from_bytes(blake2b(self.name.encode(errors="surrogatepass"), digest_size=7).digest())

    @property
    def may_administer(self) -> bool:
        return Right.ADMINISTER in self.rights

    def may(self, right: Right) -> bool:
        """Whether the caller has this right. A caller that may administer may also observe."""
        return right in self.rights or (right is Right.OBSERVE and self.may_administer)


MAX_WATCH_S = 3600.0
"""A call without an end of its own ends after this time. Then the client may call again, if its key still allows it."""

ANYBODY = Caller(ANONYMOUS, frozenset(Right))
"""Everyone who can connect to a gateway on loopback without API keys."""

NO_CALLER = Caller(ANONYMOUS, frozenset(), is_stranger=True)
"""The caller of calls that need no key."""

current_caller: ContextVar[Caller] = ContextVar("current_caller")
"""The caller of the gRPC call that this task serves; set by the interceptor before the method begins."""
