"""Ids of requests, checked so that they are safe in any log and header; ids of tool calls; clients' trace contexts.

Trace contexts follow W3C's recommendation "Trace Context".
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_WELL_FORMED = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
WELL_FORMED = "1 to 128 letters, digits, dots, colons, dashes and underscores"

_MAX_CHARACTERS = 128
_DRAWN_BYTES = 8
"""This many random bytes are appended to an id that a client offered. Without an offered id, the id consists of twice
as many random bytes."""
_MAX_OFFERED = _MAX_CHARACTERS - 2 * _DRAWN_BYTES - len("-")

MAX_PARENT_CHARACTERS = 128
"""A longer `traceparent` is ignored. A header of version 00 has 55 characters; later versions may append fields."""
MAX_STATE_CHARACTERS = 512
"""The recommendation requires systems to pass on at least this many characters. A longer state is shortened to this
length."""
MAX_STATE_MEMBERS = 32
"""A state with more members is dropped as a whole."""

LARGE_MEMBER_CHARACTERS = 128
"""If the state is too long, members with more characters than this are dropped first, then the last members."""


def is_well_formed(request_id: str) -> bool:
    return _WELL_FORMED.fullmatch(request_id) is not None


def offered_id(value: str | None) -> str | None:
    """The id that a client or proxy sent in a header (`x-request-id`); None if it is unfit for a log."""
    return value if value is not None and is_well_formed(value) else None


def request_id_for(offered: str | None) -> str:
    """A unique id that begins with the offered id, so that a search for the offered id finds it. Several
    requests may offer the same id, since a proxy sends the same id again when it retries."""
    if offered is None:
        return secrets.token_hex(2 * _DRAWN_BYTES)
    return f"{offered[:_MAX_OFFERED]}-{secrets.token_hex(_DRAWN_BYTES)}"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A client's trace context, of limited length but not interpreted."""

    parent: str
    """The header `traceparent`."""
    state: str
    """All `tracestate` headers, combined into one; may be empty."""


def trace_context_from(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """Makes a context from the values of a call's headers, in order. Returns None if they name no trace.
    Never raises.
    """
    if len(parents) != 1 or not 0 < len(parents[0]) <= MAX_PARENT_CHARACTERS:
        return None
    members = [stripped for state in states for member in state.split(",") if (stripped := member.strip())]
    if len(members) > MAX_STATE_MEMBERS:
        members = []
    if len(",".join(members)) > MAX_STATE_CHARACTERS:
        members = [member for member in members if len(member) <= LARGE_MEMBER_CHARACTERS]
    while len(",".join(members)) > MAX_STATE_CHARACTERS:
        members.pop()
    return TraceContext(parents[0], ",".join(members))


class CallIds:
    """The ids of the tool calls of one answer; the tools' results refer to them.

    Each answer draws its own ids, so ids are unique even if a client gives all its requests the same id. One object
    always gives the same id for the same index.
    """

    def __init__(self) -> None:
        self._drawn = secrets.token_bytes(16)

    def of(self, index: int, prefix: str = "call_") -> str:
        """The id of call number `index`."""
        return prefix + blake2b(f"{index}".encode(), digest_size=12, key=self._drawn).hexdigest()
