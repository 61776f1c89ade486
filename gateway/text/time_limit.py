"""run_within: a time limit for Python code that might never end; and TookTooLong, which ends this code."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(BaseException):
    """Ends code that runs too long. It is a BaseException, so that handlers of Exception in this code do not catch it.

    Code may catch it only to end at once, with a result or an error of its own.
    """


def run_within(timeout_s: float, work: Callable[[], T]) -> T:
    """Runs `work` in this thread. Raises TimeoutError if it takes longer than `timeout_s`.

    A timer makes CPython raise an exception in this thread, at its next bytecode instruction. This ends every
    loop in Python code. It does not end a call into C that never returns, or code that catches BaseException.
    """
    thread_id = threading.get_ident()
    lock = threading.Lock()
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread_id), ctypes.py_object(TookTooLong)
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
    except TookTooLong:
        raise TimeoutError(f"it took longer than {timeout_s:g} s") from None
