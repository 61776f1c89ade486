"""RankChannel: one end of the connection between rank 0 and another rank of its worker; knows no message.

Rank 0 makes a pair of Unix sockets, and the other rank inherits one of them. The pair has no name and no
port, so no other process can connect. Messages stay in order. The connection closes when either process ends,
so each rank notices the end of the other rank.
"""

import socket
import struct
import threading
from contextlib import suppress
from typing import Generic, TypeVar

from baton.errors import WireError
from baton.messages.wire import Codec

S = TypeVar("S")
R = TypeVar("R")

SEND_TIMEOUT_S = 5.0
"""If the other end reads nothing for this long, it is stuck, since it reads on a dedicated thread."""

_SEND_BUFFER_BYTES = 4 * 2**20
_LENGTH = struct.Struct(">I")


def frame_of(codec: Codec[S], message: S) -> bytes:
    """The encoded message, as it is sent. WireError if it is too large."""
    data = codec.encode(message)
    return _LENGTH.pack(len(data)) + data


class RankChannel(Generic[S, R]):
    """Sends messages of type S from any thread, and receives messages of type R on one thread."""

    def __init__(self, end: socket.socket, sends: Codec[S], receives: Codec[R]) -> None:
        """The channel owns `end` from now on."""
        # Large, so that sending a step's plan never waits for the reader. The system may allow less.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        seconds = int(SEND_TIMEOUT_S)
        # The system's timeout, since Python's own timeout would also apply to `receive`.
        end.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_SNDTIMEO,
            struct.pack("ll", seconds, int((SEND_TIMEOUT_S - seconds) * 1e6)),
        )
        self._end = end
        self._sends = sends
        self._receives = receives
        self._lock = threading.Lock()

    def send(self, message: S) -> None:
        """Sends a message; returns as soon as the system has copied it. WireError if it is too large.

        OSError if the other end is gone, or reads nothing for SEND_TIMEOUT_S. After that, no message can be
        sent."""
        self.send_frame(frame_of(self._sends, message))

    def send_frame(self, frame: bytes) -> None:
        """Like `send`, for an encoded message, which may go to several ranks."""
        with self._lock:
            self._end.sendall(frame)

    def receive(self) -> R | None:
        """Waits for the next message; None if the other end is gone. WireError for an invalid message."""
        try:
            if (head := self._read(_LENGTH.size)) is None:
                return None
            (length,) = _LENGTH.unpack(head)
            if length > (limit := self._receives.max_bytes):
                raise WireError(f"a rank's message of {length} bytes; at most {limit} are allowed")
            data = self._read(length)
        except OSError:
            return None
        return None if data is None else self._receives.decode(data)

    def close(self) -> None:
        """Closes the connection: `receive` returns None at both ends, even in a thread that waits already."""
        with suppress(OSError):  # the other end is gone
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, num_bytes: int) -> memoryview | None:
        """Reads exactly this many bytes; None if the connection closes earlier."""
        data = memoryview(bytearray(num_bytes))
        num_read = 0
        while num_read < num_bytes:
            num_new = self._end.recv_into(data[num_read:])
            if not num_new:
                return None
            num_read += num_new
        return data
