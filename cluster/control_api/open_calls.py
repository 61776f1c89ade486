"""The open calls of a control server, by connection, and their limits; knows no socket."""

import logging
from collections import defaultdict

from baton.errors import ClusterError, WireError
from baton.messages.control_codec import (
    CallFrame,
    failure,
    foreign_version,
    read_call,
    versions_differ,
)

logger = logging.getLogger(__name__)

MAX_CALLS_OF_ONE = 64
"""Most open calls of one connection. A gateway has a WaitView, a report, and its operators' calls."""
MAX_CALLS = 4096
"""Most open calls of all connections together."""


class OpenCalls:
    """Counts open calls. Every opened call must be closed exactly once."""

    def __init__(self) -> None:
        self.num_bad_messages = 0
        self._numbers: defaultdict[bytes, set[int]] = defaultdict(set)
        self._num_open = 0

    @property
    def num_open(self) -> int:
        return self._num_open

    def open_call(self, peer: bytes, frames: list[bytes]) -> CallFrame | bytes | None:
        """A call to carry out, or a reply that refuses the call, or None for a message that is no call."""
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            call = read_call(frames[0])
        except WireError as error:
            self._note_bad_message(error)
            foreign = foreign_version(frames[0]) if len(frames) == 1 else None
            return None if foreign is None else failure(foreign[1], versions_differ(foreign[0]))
        numbers = self._numbers[peer]
        if call.number in numbers:
            self._note_bad_message(WireError(f"call {call.number} is already open"))
            return None
        if len(numbers) >= MAX_CALLS_OF_ONE or self._num_open >= MAX_CALLS:
            if not numbers:
                del self._numbers[peer]
            limit = f"{MAX_CALLS_OF_ONE} of one connection, {MAX_CALLS} in all"
            return failure(call.number, ClusterError(f"too many open calls ({limit}); try again later"))
        numbers.add(call.number)
        self._num_open += 1
        return call

    def close_call(self, peer: bytes, number: int) -> None:
        numbers = self._numbers[peer]
        numbers.remove(number)
        self._num_open -= 1
        if not numbers:
            del self._numbers[peer]

    def _note_bad_message(self, error: WireError) -> None:
        self.num_bad_messages += 1
        if self.num_bad_messages.bit_count() == 1:  # 1, 2, 4, 8, ...: a peer must not fill the log
            logger.warning("dropped a control message (%d so far): %s", self.num_bad_messages, error)
