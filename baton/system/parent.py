"""end_with_parent: a process that must not outlive the one that started it."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Makes Linux send this process the signal `number` when the parent's thread that started it ends, even by SIGKILL.

    On other systems this process continues.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
