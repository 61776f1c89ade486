"""run_within: a time limit for Python code that may not end."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _TookTooLong(BaseException):
    """Passes all handlers in the code, which catch Exception at most."""


def run_within(timeout_s: float, work: Callable[[], T]) -> T:
    """Runs `work` in this thread; TimeoutError if it takes longer.

    CPython raises an exception in another thread at its next bytecode instruction. So this ends every loop in Python
    code, but no call into C that does not return, and no code that catches BaseException.
    """
    thread_id = threading.get_ident()
    lock = threading.Lock()
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread_id), ctypes.py_object(_TookTooLong)
                )

    timer = threading.Timer(timeout_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return work()
        finally:
            timer.cancel()
            with lock:
                is_over = True
    except _TookTooLong:
        raise TimeoutError(f"it took longer than {timeout_s:g} s") from None
