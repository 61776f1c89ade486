"""Runs an event loop beside the main thread, which starts and ends Ray's nodes: they die with their thread."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_beside(work: Callable[["MainThread"], Coroutine[Any, Any, T]]) -> T:
    """Runs `work` in an event loop of another thread, and returns its result. Meanwhile, this thread makes the calls
    of `work`."""
    main_thread = MainThread()
    result: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(work, main_thread, result), name="event loop")
    thread.start()
    main_thread.serve()
    thread.join()
    return result.result()


class MainThread:
    """Calls to be made on the main thread, one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, call: Callable[[], T]) -> T:
        """Has the main thread make the call; returns its result, or raises its error. Called on the loop's thread."""
        done: Future[T] = Future()

        def execute() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        self._calls.put(execute)
        return await asyncio.shield(asyncio.wrap_future(done))

    def serve(self) -> None:
        """Makes every call, until `end`."""
        while (call := self._calls.get()) is not None:
            call()

    def end(self) -> None:
        self._calls.put(None)


def _run(
    work: Callable[[MainThread], Coroutine[Any, Any, T]], main_thread: MainThread, result: "Future[T]"
) -> None:
    try:
        result.set_result(asyncio.run(work(main_thread)))
    except BaseException as error:
        result.set_exception(error)
    finally:
        main_thread.end()
