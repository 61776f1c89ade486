"""Runs an event loop beside the main thread, which does what the loop must not: Ray's nodes die with their thread."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_beside(work: Callable[["Errands"], Coroutine[Any, Any, T]]) -> T:
    """The result of `work`, in an event loop of another thread; errands are done here meanwhile."""
    errands = Errands()
    result: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(work, errands, result), name="event loop")
    thread.start()
    errands.do_all()
    thread.join()
    return result.result()


class Errands:
    """Things to be done on the main thread, one after the other."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, errand: Callable[[], T]) -> T:
        """What `errand` returns, or its error; from the loop's thread."""
        done: Future[T] = Future()

        def carry_out() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(errand())
            except Exception as error:
                done.set_exception(error)

        self._orders.put(carry_out)
        return await asyncio.shield(asyncio.wrap_future(done))

    def do_all(self) -> None:
        """Until `end`."""
        while (order := self._orders.get()) is not None:
            order()

    def end(self) -> None:
        self._orders.put(None)


def _run(work: Callable[[Errands], Coroutine[Any, Any, T]], errands: Errands, result: "Future[T]") -> None:
    try:
        result.set_result(asyncio.run(work(errands)))
    except BaseException as error:
        result.set_exception(error)
    finally:
        errands.end()
