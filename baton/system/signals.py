"""Ctrl-C, politely: the first asks to stop, the second to hurry, the third kills; knows nothing of what stops."""

import asyncio
import signal
from collections.abc import Awaitable, Coroutine
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Ctrl-C from the start of a program's work to its end: KeyboardInterrupt outside `run`, events inside.

    No SIGINT of the time before is lost. Python drops a KeyboardInterrupt that is raised where nobody could catch it,
    as in a destructor or in a callback of an extension module; so it is noted too, and `run` begins with `stop` set.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def __enter__(self) -> "StopSignals":
        self._former = signal.signal(signal.SIGINT, self._on_early_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._former)

    def run(self, work: Coroutine[object, object, None]) -> None:
        """`asyncio.run`, in which SIGINT and SIGTERM raise nothing but set `stop`, then `hurry`."""
        # A KeyboardInterrupt while the loop is being made would leave half a loop, and its complaints, behind.
        signal.signal(signal.SIGINT, lambda *_: self._on_signal())
        asyncio.run(self._with_handlers(work))

    async def _with_handlers(self, work: Coroutine[object, object, None]) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            await work
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_early_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.stop.set()
        raise KeyboardInterrupt

    def _on_signal(self) -> None:
        if not self.stop.is_set():
            self.stop.set()
        elif not self.hurry.is_set():
            self.hurry.set()
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


async def unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Runs `work` to its end, or cancels it once `event` is set; whether it came to its end. Its errors are raised."""
    working = asyncio.ensure_future(work)
    interrupted = asyncio.ensure_future(event.wait())
    either: set[asyncio.Future[object]] = {working, interrupted}  # type: ignore[arg-type]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        working.cancel()
        interrupted.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)
