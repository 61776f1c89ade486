"""Bugs that the simulation found in this code, put back one at a time: the seed that showed each shows it still.

python -m tests.simulation.unmended         # seeds for the table, when scenarios have changed
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from gateway.requests.attempt import Attempt, AttemptFailure
from kv_transfer.consumer.endpoint import ConsumerEndpoint
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.protocol.messages import Pieces
from kv_transfer.protocol.outgoing import OutgoingState, OutgoingTransfer
from kv_transfer.protocol.producer import Producer
from tests.simulation.planted import Patch, Plant, hunt


def go_on_without_any_worker() -> Patch:
    """A prefill worker that is lost after the decode request has ended left the client waiting for ever."""

    original = Attempt.on_lost

    def on_lost(self: Attempt, worker: str, reason: str, **options: bool) -> AttemptFailure | None:
        if worker == self.placement.prefill and self.decode_recomputes:
            self.open_workers.discard(worker)
            return None
        return original(self, worker, reason, **options)

    return patch.multiple(Attempt, on_lost=on_lost, abandoned=lambda _self: None)


def count_what_never_began() -> Patch:
    """A doubled Release, which came after a late Hold, counted as another hand-over that was done."""

    def count_end(self: Producer, transfer: OutgoingTransfer, counter: str, reason: str = "") -> None:
        transfer.end_reason = transfer.end_reason or reason
        if transfer.state is not OutgoingState.CANCELLED:
            self._counters[counter] += 1

    return patch.object(Producer, "_count_end", count_end)


def count_ends_twice() -> Patch:
    """A hand-over that was cancelled by the one end and then ended by the other counted twice."""

    def count_end(self: Producer, transfer: OutgoingTransfer, counter: str, reason: str = "") -> None:
        transfer.end_reason = transfer.end_reason or reason
        if transfer.rank_transfer is not None:
            self._counters[counter] += 1

    return patch.object(Producer, "_count_end", count_end)


def ask_late_how_a_piece_came() -> Patch:
    """A read that ended after its transport had been given up ended the transfer thread."""
    original = ConsumerEndpoint._arrived

    def arrived(
        self: ConsumerEndpoint,
        message: Pieces,
        wanted: WantedPieces,
        missing: Iterable[int],
        _transport: str,
        checksums: Mapping[int, int],
    ) -> Any:
        return original(self, message, wanted, missing, self._consumer.transport_of(message.key), checksums)

    return patch.object(ConsumerEndpoint, "_arrived", arrived)


@dataclass(frozen=True, slots=True)
class Unmended:
    """How to put a bug back, and a seed that finds it."""

    plant: Plant
    seed: int


UNMENDED = (
    Unmended(go_on_without_any_worker, 114),
    Unmended(count_what_never_began, 4),
    Unmended(count_ends_twice, 1),
    Unmended(ask_late_how_a_piece_came, 8),
)


def main() -> int:
    for bug in UNMENDED:
        found = hunt(bug.plant, num_jobs=2).found
        print(f"{bug.plant.__name__:<30} {found.seed if found else 'NOBODY'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
