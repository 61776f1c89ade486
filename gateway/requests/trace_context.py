"""TraceContext: to which trace of its client's a request belongs; W3C's recommendation "Trace Context"."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PARENT_CHARACTERS = 128
"""Version 00 has 55; what later ones add comes behind these."""
MAX_STATE_CHARACTERS = 512
"""What the recommendation asks everybody to carry; what a client sends beyond that is cut off."""
MAX_STATE_MEMBERS = 32
LARGE_MEMBER_CHARACTERS = 128
"""Where something has to go, members that are larger go first."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """As it came, but bounded; whether it means anything is for whoever reads it."""

    parent: str
    """`traceparent`."""
    state: str
    """`tracestate`, all of the headers by that name as one; may be empty."""


def trace_context_from(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """By the values of a call's headers, in their order. None where they name no trace: it refuses nothing."""
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
