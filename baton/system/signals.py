"""Graceful Ctrl-C: the first one asks the program to stop, the second to hurry, the third kills it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Coroutine
from types import FrameType

from baton.system.tasks import end_tasks

_OUTPUTS = (1, 2)
"""The descriptors of stdout and stderr."""


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP from start to end of a program: KeyboardInterrupt before `run`, events from
    then on.

    No earlier signal is lost. Python drops a KeyboardInterrupt raised where it cannot be caught, such as in a
    destructor or in a callback of an extension module. So the signal is also recorded, and `run` then begins
    with `stop` set.

    SIGHUP says that the program's terminal was closed. However often it comes, it only asks to stop, since the shell
    and the system may both send it. From then on, output to the terminal is dropped, since writing it would fail. Under
    `nohup`, SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def __enter__(self) -> "StopSignals":
        self._on_terminal = [output for output in _OUTPUTS if os.isatty(output)]
        has_hangups = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        numbers = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if has_hangups else []))
        self._former = {number: signal.signal(number, self._on_early_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def run(self, work: Coroutine[object, object, None]) -> None:
        """`asyncio.run` in which the signals set `stop`, then `hurry`, instead of raising."""
        # A KeyboardInterrupt while the loop is being created would leave an incomplete loop, which prints
        # error messages.
        self._handle_as_events()
        asyncio.run(self._with_handlers(work))

    async def _with_handlers(self, work: Coroutine[object, object, None]) -> None:
        loop = asyncio.get_running_loop()
        for number in self._former:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await work
        finally:
            for number in self._former:
                loop.remove_signal_handler(number)
            self._handle_as_events()  # otherwise, SIGTERM would end the process at once

    def _handle_as_events(self) -> None:
        for number in self._former:
            signal.signal(number, lambda number, _: self._on_signal(number))

    def _on_early_signal(self, number: int, _frame: FrameType | None) -> None:
        is_repeated = self.stop.is_set()
        self.stop.set()
        if number == signal.SIGHUP:
            self._leave_terminal()
            if is_repeated:
                return
        raise KeyboardInterrupt

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
            self.stop.set()
        elif not self.stop.is_set():
            self.stop.set()
        elif not self.hurry.is_set():
            self.hurry.set()
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    def _leave_terminal(self) -> None:
        """Drops all further output to the closed terminal."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in self._on_terminal:
            os.dup2(nowhere, output)
        os.close(nowhere)


async def unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Runs `work` to its end, or cancels it once `event` is set. Returns whether it completed; raises its errors."""
    working = asyncio.ensure_future(work)
    interrupted = asyncio.ensure_future(event.wait())
    both: set[asyncio.Future[object]] = {working, interrupted}  # type: ignore[arg-type]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        await end_tasks(working, interrupted)


async def either(*works: Awaitable[None]) -> None:
    """Returns when the first of `works` ends, or raises its error; cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await end_tasks(*tasks)
