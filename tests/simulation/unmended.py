"""Bugs that the simulation found in this code, put back one at a time: the seed that showed each still shows it.

python -m tests.simulation.unmended         # seeds for the table, when scenarios have changed
"""

import sys
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from gateway.requests.attempt import Attempt, AttemptFailure
from kv_transfer.consumer.block_writer import WrittenPieces
from kv_transfer.consumer.endpoint import ConsumerEndpoint
from kv_transfer.protocol.outgoing import OutgoingState, OutgoingTransfer
from kv_transfer.protocol.producer import Producer
from tests.simulation.hunt import Plant, bug, hunt


@bug(Attempt, "on_lost")
def lose_a_prefill_worker(
    original: Any, self: Attempt, worker: str, reason: str, **options: bool
) -> AttemptFailure | None:
    if worker == self.placement.prefill and self.decode_recomputes:
        self.open_workers.discard(worker)
        return None
    return original(self, worker, reason, **options)  # type: ignore[no-any-return]


@bug(Attempt, "abandoned")
def never_abandoned(_original: Any, _self: Attempt) -> None:
    """An attempt does not fail if no worker runs the request any more."""


def go_on_without_any_worker() -> AbstractContextManager[Any]:
    """A client waited for ever if its prefill worker was lost after its decode request had ended."""
    with ExitStack() as patches:
        patches.enter_context(lose_a_prefill_worker())
        patches.enter_context(never_abandoned())
        return patches.pop_all()


@bug(Producer, "_count_end")
def count_what_never_began(
    _original: Any, self: Producer, transfer: OutgoingTransfer, counter: str, reason: str = ""
) -> None:
    """A second Release after a late Hold counted as another successful hand-over."""
    transfer.end_reason = transfer.end_reason or reason
    if transfer.state is not OutgoingState.CANCELLED:
        self._counters[counter] += 1


@bug(Producer, "_count_end")
def count_ends_twice(
    _original: Any, self: Producer, transfer: OutgoingTransfer, counter: str, reason: str = ""
) -> None:
    """A hand-over that one end cancelled and the other ended counted twice."""
    transfer.end_reason = transfer.end_reason or reason
    if transfer.rank_transfer is not None:
        self._counters[counter] += 1


@bug(ConsumerEndpoint, "_on_written")
def ask_late_how_a_piece_came(original: Any, self: ConsumerEndpoint, written: WrittenPieces) -> Any:
    """A read that ended after its transport was given up ended the transfer thread."""
    assert self._consumer._transfers[written.wanted.message.key].transport is not None
    return original(self, written)


UNMENDED: dict[Plant, int] = {
    go_on_without_any_worker: 54,
    count_what_never_began: 5,
    count_ends_twice: 16,
    ask_late_how_a_piece_came: 15,
}
"""A seed that finds each bug."""


def main() -> int:
    for plant in UNMENDED:
        found = hunt(plant, num_jobs=2).found
        print(f"{plant.__name__:<30} {found.seed if found else 'none'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
