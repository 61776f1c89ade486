"""An event loop in virtual time. A test can make it stand still. For code that waits for no socket and no thread."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

TURN_S = 1e-6
"""The least time of one turn of the loop."""
MAX_S = 1000.0


class _Selector(selectors.DefaultSelector):
    """A selector that advances the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        assert ready or timeout is not None, "all tasks wait for ever"
        self.now += TURN_S if ready or timeout is None else max(TURN_S, timeout)
        assert self.now < MAX_S, "it does not come to an end"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is also a Clock's."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def now(self) -> float:
        return self._virtual.now

    def stand_still(self, seconds: float) -> None:
        """Lets time pass as if the process had been stopped, or a callback had taken so long."""
        self._virtual.now += seconds


def virtual_loop() -> VirtualLoop:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on its own loop."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
