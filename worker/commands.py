"""CommandQueue: any thread puts commands, the engine's thread runs them between two steps; knows no command."""

import queue
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from baton.errors import FleetError

T = TypeVar("T")

Command = Callable[[], None]


class CommandQueue(queue.SimpleQueue[Command]):
    """Commands for the engine's thread. The queue is created before the engine, since parts of the engine call
    `wake`."""

    def wake(self) -> None:
        """Wakes the engine's thread after a change outside it, such as the end of a transfer."""
        self.put(lambda: None)

    def ask(self, command: Callable[[], T], timeout_s: float, ended: "Future[None]") -> T:
        """Has the engine's thread run `command`; returns its result, or raises its FleetError.

        `ended` is done when the engine's thread has ended. If the thread has ended, or does not begin the command
        within `timeout_s`, the command is not run, and FleetError says why.
        """
        done: Future[T] = Future()
        self.put(lambda: _run(command, done))
        either: list[Future[Any]] = [done, ended]
        wait(either, timeout_s, FIRST_COMPLETED)
        if done.cancel():
            obstacle = "has ended" if ended.done() else f"was busy with one step for {timeout_s:g} s"
            raise FleetError(f"its engine {obstacle}")
        return done.result()


def _run(command: Callable[[], T], done: "Future[T]") -> None:
    if not done.set_running_or_notify_cancel():
        return  # the caller has been told that the command was not run
    try:
        done.set_result(command())
    except FleetError as error:
        done.set_exception(error)
    except BaseException as error:
        done.set_exception(FleetError(f"its engine failed: {error}"))
        raise
