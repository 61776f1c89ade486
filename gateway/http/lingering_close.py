"""LingeringTransport: a connection whose close does not cost the client its answer; does not know HTTP."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class LingeringTransport:
    """A transport of asyncio, apart from how it closes.

    If a connection is closed while data of its client is unread, the kernel resets it, and the client may lose the
    answer. So `close` sends the answer and its end, but drops what still arrives, until the client closes its side
    (RFC 9112, 9.6). All other attributes are the transport's.
    """

    def __init__(
        self, transport: asyncio.Transport, may_get_more: Callable[[], bool], longest_s: float
    ) -> None:
        """`may_get_more`: whether the client may still send data. If not, `close` closes at once. `longest_s`: how long
        data is dropped at most."""
        self._transport = transport
        self._may_get_more = may_get_more
        self._longest_s = longest_s
        self._end: asyncio.TimerHandle | None = None
        """The end of the time in which data is dropped; None before `close`."""

    def is_closing(self) -> bool:
        """True from `close` on: then all data that arrives must be dropped."""
        return self._end is not None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._end is None:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing() or not self._may_get_more():
            self.close_now()
            return
        if self._transport.can_write_eof():  # TLS cannot; then the answer's length shows its end
            with suppress(OSError):  # the client's reset has arrived, but was not read yet
                self._transport.write_eof()
        self._transport.resume_reading()
        self._end = asyncio.get_running_loop().call_later(self._longest_s, self._transport.close)

    def abort(self) -> None:
        self.close_now()
        self._transport.abort()

    def close_now(self) -> None:
        """Sends the rest of the answer, and closes without waiting for the client."""
        if self._end is not None:
            self._end.cancel()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
