"""A value that takes seconds to load, made beside other work on a thread that can be cut off; knows not what."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

_CUT_EVERY_S = 0.1


class _CutOff(BaseException):
    """Raised in the thread whose result nobody wants any more; no `except Exception` below it catches it."""


class Loading(Generic[T]):
    """Calls `make` on a thread of its own. `result` gets its value, or what it raised.

    Where a KeyboardInterrupt may come between any two steps, register the exit first, and then `begin`.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.result: Future[T] = Future()
        self.result.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        self._is_cut_off = False
        self._thread = threading.Thread(target=self._run, args=(make,), name="loading")

    def begin(self) -> None:
        self._thread.start()

    def __enter__(self) -> "Loading[T]":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """Returns once the thread is gone, and does not wait for `make`: that ends before its next line of Python.

        An import of thousands of modules would otherwise hold up the end of the process: Python waits for threads,
        and a daemon thread that is inside an extension module when the interpreter goes may abort the process.
        """
        self._is_cut_off = True  # for a thread that was begun and has not come to its first line yet
        while self._thread.is_alive():
            # Again and again, since code that is being imported may catch everything. See PyThreadState_SetAsyncExc
            # in https://docs.python.org/3/c-api/init.html: the thread raises it when it next runs bytecode.
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
        except _CutOff:  # came as the result was being set
            pass
