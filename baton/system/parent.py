"""A process that must not outlive the one that started it."""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Makes Linux send this process the signal `number` when the parent's thread that started it ends, even by SIGKILL.

    On other systems this process continues.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def when_closed(connection: int, end: Callable[[], object]) -> None:
    """Calls `end` on a thread of its own once the other end of this pipe or socket is closed. Reads nothing from it."""

    def wait() -> None:
        poll = select.poll()
        poll.register(connection, 0)  # waits only for the end of the connection
        poll.poll()
        end()

    threading.Thread(target=wait, name="parent-gone", daemon=True).start()


def kill_group() -> None:
    """Ends this process by SIGKILL, and the processes that it has started, if it leads a process group."""
    target = 0 if os.getpgrp() == os.getpid() else os.getpid()
    os.kill(target, signal.SIGKILL)
