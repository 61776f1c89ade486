"""WakeUp: lets any thread wake another thread that waits in a poller; needs no lock."""

import signal
import socket


class WakeUp:
    """A level-triggered flag with a file descriptor, for poll loops that also watch sockets.

    `set` is safe from every thread and signal handler; `fileno` goes into a poller. The owner calls `clear` before it
    looks for work, so that no wake-up is lost.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        """Makes `fileno` readable until the next `clear`; does nothing after `close`."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            return  # full, so readable already
        except OSError:
            return  # closed: no thread waits any more

    def set_by_signals(self) -> None:
        """From now on, each signal with a handler in Python sets the flag. Only the main thread may call this.

        A handler that calls `set` is not enough: Python runs it between two instructions of the main thread. If the
        signal comes right before that thread waits in a poller, the handler would run only after the wait.
        """
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def clear(self) -> None:
        try:
            while self._reader.recv(4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
