"""Loads a value, which takes seconds, on a thread that can be interrupted; does not know what the value is."""

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_CUT_EVERY_S = 0.1


class _CutOff(BaseException):
    """Raised in the thread whose result is no longer needed; no `except Exception` below it catches it."""


class Loading(Generic[T]):
    """Calls `make` on a thread of its own. `result` receives its value or exception.

    If a KeyboardInterrupt may be raised between any two steps, register `__exit__` first, and then call `begin`.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.result: Future[T] = Future()
        self.result.set_running_or_notify_cancel()  # a waiter that stops waiting does not cancel it
        self._is_cut_off = False
        self._thread = threading.Thread(target=self._run, args=(make,), name="loading")

    def begin(self) -> None:
        self._thread.start()

    def __enter__(self) -> "Loading[T]":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """Interrupts `make` before its next line of Python, and returns once the thread has ended.

        Otherwise, an import of thousands of modules would delay the end of the process, since Python waits for
        threads. Python does not wait for daemon threads, but a daemon thread inside an extension module may abort the
        process while the interpreter shuts down.
        """
        self._is_cut_off = True  # for a thread that was started but has not reached its first line
        report, sys.unraisablehook = sys.unraisablehook, _report_others(sys.unraisablehook)
        try:
            self._end_thread()
        finally:
            sys.unraisablehook = report

    def _end_thread(self) -> None:
        while self._thread.is_alive():
            # Repeated, since code that is being imported may catch everything. See PyThreadState_SetAsyncExc in
            # https://docs.python.org/3/c-api/init.html: the thread raises _CutOff when it next runs bytecode.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_CutOff)
            )
            self._thread.join(_CUT_EVERY_S)

    def _run(self, make: Callable[[], T]) -> None:
        try:
            try:
                if not self._is_cut_off:
                    self.result.set_result(make())
            except BaseException as error:
                if not self.result.done():
                    self.result.set_exception(error)
        except _CutOff:  # arrived while the result was being set
            pass


def _report_others(report: Callable[[Any], object]) -> Callable[[Any], object]:
    """Like `report`, but says nothing about a _CutOff. Python reports, and drops, an exception within a destructor."""
    return lambda dropped: None if dropped.exc_type is _CutOff else report(dropped)
