"""Ctrl-C, politely: the first asks to stop, the second to hurry, the third kills; knows nothing of what stops."""

import asyncio
import signal
from collections.abc import Awaitable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Turns SIGINT and SIGTERM into events of the running loop while the context lasts."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

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
