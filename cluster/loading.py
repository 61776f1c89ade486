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
    """Calls `make` at once, on a thread of its own. `result` gets its value, or what it raised."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.result: Future[T] = Future()
        self.result.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        self._thread = threading.Thread(target=self._run, args=(make,), name="loading")
        self._thread.start()

    def __enter__(self) -> "Loading[T]":
        return self

    def __exit__(self, *_: object) -> None:
        """Returns once the thread is gone, and does not wait for `make`: that ends before its next line of Python.

        An import of thousands of modules would otherwise hold up the end of the process: Python waits for threads,
        and a daemon thread that is inside an extension module when the interpreter goes may abort the process.
        """
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
                self.result.set_result(make())
            except BaseException as error:
                if not self.result.done():
                    self.result.set_exception(error)
        except _CutOff:  # came as the result was being set
            pass
