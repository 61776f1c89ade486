"""ProcessExits: which processes of this host have ended, as the kernel says; knows not what they were."""

import os
import select


class ProcessExits:
    """Watches processes by their pidfds. Belongs to one thread, which may sleep on `fileno`.

    The kernel tells of every end at once, `kill -9` included, when the process has closed all it had open. It never
    tells so of one that is stopped, or that only says nothing.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._running: set[int] = set()
        """Watches that nothing was said of yet."""

    def fileno(self) -> int:
        """Readable while `take` has something to say."""
        return self._epoll.fileno()

    def watch(self, pid: int) -> int | None:
        """What `take` will name when that process has ended; `drop` must follow.

        None where nobody can tell: the system has no pidfds or gives none away, or that is no process id.
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
        """The watches whose processes have ended; each is named once."""
        ended = [pidfd for pidfd, _ in self._epoll.poll(0)]
        for pidfd in ended:
            self._forget(pidfd)  # it stays readable, and who sleeps on `fileno` would sleep no more
        return ended

    def drop(self, watch: int) -> None:
        if watch in self._running:
            self._forget(watch)
        os.close(watch)

    def close(self) -> None:
        """When every watch is dropped."""
        self._epoll.close()

    def _forget(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        self._running.remove(pidfd)
