"""Control calls to a worker that is a child process: calls arrive on its stdin, and it writes replies to its stdout.
Each call and each reply is a line of base64.

Every call is answered once, when it is done, so replies may overtake one another. A line that is not a call
is answered with a WireError and the number 0. The client skips lines of stdout that are not replies, such as
the output of libraries.
"""

import asyncio
import binascii
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any, TypeVar

from baton.errors import BatonError, ClusterError, FleetError, WireError
from baton.messages.control import WORKER_CALLS, ControlRequest
from baton.messages.control_codec import (
    ControlCodec,
    Reply,
    failure,
    read_call,
    read_reply,
    write_call,
)

MAX_LINE_BYTES = 64 * 1024
"""The longest call, as a line of base64."""

MAX_CALLS = 8
"""Calls that may be open at a time; any further call is answered with an error."""

CODEC = ControlCodec(WORKER_CALLS)

R = TypeVar("R")


class StdioControlServer:
    """The worker's end. Each call has a thread, so that a long call does not delay other calls.

    The threads start when the server is created: later, the system may have no free thread, and a worker that cannot
    answer is ended.
    """

    def __init__(
        self, call: Callable[[ControlRequest[Any]], object], write_line: Callable[[str], None]
    ) -> None:
        """`call` carries out requests; it may block. `write_line` is never called from two threads at once."""
        self._call = call
        self._write_line = write_line
        self._lock = threading.Lock()
        self._buffer = b""
        self._places = threading.BoundedSemaphore(MAX_CALLS)
        self._calls: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        for _ in range(MAX_CALLS):
            threading.Thread(target=self._serve, name="control", daemon=True).start()

    def receive(self, data: bytes) -> None:
        """Handles bytes of stdin in the order of their arrival."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._begin(line)
        if len(self._buffer) > MAX_LINE_BYTES:
            self._reply(failure(0, WireError(f"a call is longer than {MAX_LINE_BYTES} bytes")))
            self._buffer = b""

    def close(self) -> None:
        """Ends each thread after its call, without waiting."""
        for _ in range(MAX_CALLS):
            self._calls.put(None)

    def _begin(self, line: bytes) -> None:
        try:
            frame = _from_line(line)
            number = read_call(frame).number
        except WireError as error:
            self._reply(failure(0, WireError(f"not a call: {error}")))
            return
        if not self._places.acquire(blocking=False):
            self._reply(failure(number, FleetError(f"{MAX_CALLS} calls are under way already")))
            return
        self._calls.put((number, frame))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            number, frame = call
            try:
                self._reply(CODEC.carry_out(frame, self._call))
            except Exception as error:  # nothing else catches this: the caller must get an answer
                self._reply(failure(number, ClusterError(str(error) or type(error).__name__)))
            finally:
                self._places.release()

    def _reply(self, frame: bytes) -> None:
        with self._lock:
            self._write_line(_to_line(frame))


class StdioControlClient:
    """The parent's end, used after the worker's endpoint was read. A call has no time limit. It raises the worker's
    error, or ClusterError as soon as the worker has ended."""

    def __init__(self, name: str, stdin: IO[str], stdout: IO[str]) -> None:
        """From now on, only the client reads and writes the streams. It closes `stdout` once the worker has closed it;
        the owner of the process closes `stdin`, which ends the worker."""
        self._stdin = stdin
        self._stdout = stdout
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Future[Reply]] = {}
        self.is_gone = False
        """The worker has closed its end."""
        self._reader = threading.Thread(target=self._read, name=f"control {name}", daemon=True)
        self._reader.start()

    async def call(self, request: ControlRequest[R]) -> R:
        return CODEC.value_in(await asyncio.wrap_future(self._send(request)), request)

    def _send(self, request: ControlRequest[Any]) -> Future[Reply]:
        """Runs on any thread: writing takes hardly any time, since a call is short and the worker reads at once."""
        future: Future[Reply] = Future()
        with self._lock:
            if self.is_gone:
                raise _loss()
            frame = CODEC.frame(next(self._numbers), 0.0, request)
            self._open[frame.number] = future
            try:
                self._stdin.write(_to_line(write_call(frame)) + "\n")
                self._stdin.flush()
            except (OSError, ValueError):  # the pipe is broken, or the owner of the process has closed it
                del self._open[frame.number]
                raise _loss() from None
        return future

    def _read(self) -> None:
        # ValueError: the owner of the process has closed the stream while this thread was between two lines.
        with contextlib.suppress(ValueError), self._stdout:
            for line in self._stdout:
                self._on_line(line)
        with self._lock:
            self.is_gone = True
            unanswered, self._open = list(self._open.values()), {}
        for future in unanswered:
            if future.set_running_or_notify_cancel():
                future.set_exception(_loss())

    def _on_line(self, line: str) -> None:
        try:
            reply = read_reply(_from_line(line.encode()))
        except WireError:
            return
        with self._lock:
            future = self._open.pop(reply.number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(reply)


def _loss() -> BatonError:
    return ClusterError("its process has ended")


def _to_line(frame: bytes) -> str:
    return binascii.b2a_base64(frame, newline=False).decode()


def _from_line(line: bytes) -> bytes:
    try:
        return binascii.a2b_base64(line.strip(), strict_mode=True)
    except binascii.Error as error:
        raise WireError(f"not base64: {error}") from None
