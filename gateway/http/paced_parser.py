"""PacedParser: h11's parser of one connection, which reads few chunks of a body in one turn of the event loop.

ReadTurns: lets one connection after the other read on.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import h11

CHUNKS_PER_TURN = 64
"""At most this many chunks are read in one turn, which takes about 2 ms. A client may send chunks of one byte: without
this limit, the 40,000 chunks of one read take more than a second."""


class PacedParser(h11.Connection):
    """Returns h11.NEED_DATA after CHUNKS_PER_TURN chunks, even if it has more data. Then `has_more` is true, and the
    caller continues in a later turn, after a call of `begin_turn`."""

    _num_left = CHUNKS_PER_TURN

    @property
    def has_more(self) -> bool:
        return self._num_left == 0

    def begin_turn(self) -> None:
        self._num_left = CHUNKS_PER_TURN

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self._num_left == 0:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_left -= 1
        return event


class ReadTurns:
    """Connections whose bodies have more chunks: in each turn of the event loop, the longest waiting one reads on."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, read_on: Callable[[], None]) -> None:
        """Calls `read_on` in a later turn."""
        self._waiting.append(read_on)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        read_on = self._waiting[0]
        try:
            read_on()  # may wait again
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)
