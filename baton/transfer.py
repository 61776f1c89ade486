"""One hand-over as one of its ends saw it: events in seconds since that end began, never readings of a clock."""

from dataclasses import dataclass, replace
from enum import Enum

from baton.kv import TransferRole


class TransferEventKind(Enum):
    """Events of a hand-over, in the order in which they happen. Each end sees only some of them."""

    BEGUN = "begun"
    """The worker accepted the request, and its engine began the hand-over."""
    ASKED = "asked"
    """Consumer: blocks are reserved, and the producer was asked for its pieces."""
    FIRST_PIECE = "first_piece"
    """Consumer: the first piece was announced or arrived. Producer: the first was offered or sent."""
    PREFILLED = "prefilled"
    """Producer: the prompt is computed."""
    VERIFIED = "verified"
    """Consumer: every piece is verified, and the producer's `End` has arrived."""
    RELEASED = "released"
    """Producer: the consumer has everything, and the blocks are free."""
    NOT_NEEDED = "not_needed"
    """The request itself ended first: cancelled, past its deadline, or answered by the prefill worker alone."""
    FAILED = "failed"
    """The hand-over ended in any other way, and the request continued."""


@dataclass(frozen=True, slots=True)
class TransferEvent:
    kind: TransferEventKind
    at_s: float
    """Seconds since the record's time origin; see TransferRecord."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """A hand-over that has ended; with tensor parallelism, one record for all ranks of this end.

    The connector counts `at_s` from BEGUN, the worker from the request's arrival there, and the gateway from the
    request's arrival at the gateway. To convert `at_s`, worker and gateway each add a duration that they measured on
    their own clock.
    """

    role: TransferRole
    """The end that made this record."""
    peer: str
    """The other end's name."""
    attempt: int
    """The number of the attempt. The attempts at one request are numbered from 0."""
    transport: str = ""
    """The transport of the pieces; if there were several, the last. Empty if the ends agreed on none."""
    num_bytes: int = 0
    """Bytes sent, offered to be read, or received; pieces that were sent twice count twice."""
    events: tuple[TransferEvent, ...]
    """In the order of their times; the last one says how the hand-over ended."""
    reason: str = ""
    """Why it failed or was not needed."""
    is_link_failure: bool = False
    """The hand-over failed because these two workers cannot exchange KV, although each may be healthy: no
    answer arrives, no transport works, pieces arrive damaged, or the two workers do not match."""

    def at(self, kind: TransferEventKind) -> float | None:
        """When this event happened; None if it did not."""
        return next((event.at_s for event in self.events if event.kind is kind), None)

    @property
    def ended_s(self) -> float:
        return self.events[-1].at_s

    @property
    def elapsed_s(self) -> float:
        """Consumer: from asking for pieces to the end; 0 if it never asked."""
        asked_s = self.at(TransferEventKind.ASKED)
        return 0.0 if asked_s is None else self.ended_s - asked_s

    @property
    def moving_s(self) -> float:
        """From the first piece to the end; 0 without a piece."""
        first_s = self.at(TransferEventKind.FIRST_PIECE)
        return 0.0 if first_s is None else self.ended_s - first_s

    @property
    def exposed_s(self) -> float:
        """Producer: from the end of the prefill to the release; 0 without a release. This part of the hand-over never
        overlaps with the prefill."""
        released_s, prefilled_s = self.at(TransferEventKind.RELEASED), self.at(TransferEventKind.PREFILLED)
        return 0.0 if released_s is None or prefilled_s is None else released_s - prefilled_s

    def shifted(self, seconds: float) -> "TransferRecord":
        """The same record with its time origin moved this much earlier."""
        events = tuple(TransferEvent(event.kind, event.at_s + seconds) for event in self.events)
        return replace(self, events=events)
