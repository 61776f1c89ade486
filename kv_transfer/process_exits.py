"""ProcessExits: which processes of this host have ended, as the kernel reports; does not know what they ran."""

import os
import select


class ProcessExits:
    """Watches processes by their pidfds. Belongs to one thread, which may sleep on `fileno`.

    The kernel reports every end at once, `kill -9` included, after the process has closed all its files. It reports
    nothing about a process that is stopped or only silent.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._running: set[int] = set()
        """Watches whose processes have not ended, as far as `take` has reported."""

    def fileno(self) -> int:
        """Readable while `take` has something to return."""
        return self._epoll.fileno()

    def watch(self, pid: int) -> int | None:
        """A watch, which `take` returns once that process has ended; `drop` must follow.

        None if the end cannot be noticed: the system has or grants no pidfd, or the process id is impossible.
        ProcessLookupError if there is no such process.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, OverflowError):
            return None
        self._epoll.register(pidfd, select.EPOLLIN)
        self._running.add(pidfd)
        return pidfd

    def take(self) -> list[int]:
        """The watches whose processes have ended; each is returned once."""
        ended = [pidfd for pidfd, _ in self._epoll.poll(0)]
        for pidfd in ended:
            self._forget(pidfd)  # it stays readable, so a sleep on `fileno` would never last
        return ended

    def drop(self, watch: int) -> None:
        if watch in self._running:
            self._forget(watch)
        os.close(watch)

    def close(self) -> None:
        """Every watch must be dropped before."""
        self._epoll.close()

    def _forget(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        self._running.remove(pidfd)
