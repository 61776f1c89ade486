"""FairThreads: threads that callers share fairly. One caller never gets all of them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import Overloaded
from baton.system.turns import FairTurns

T = TypeVar("T")

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Work that waits for a thread."""

    caller: str
    cost: int
    turn: "asyncio.Future[None]"


class FairThreads:
    """Use it from one event loop only. Work that has begun continues if `run` is cancelled."""

    def __init__(self, number: int, name: str, what: str, max_waiting: int) -> None:
        """A caller has at most `number` - 1 threads at a time. `what`: the work's name in a refusal, in the plural."""
        assert number > 1, f"one caller could hold all of {number} threads"
        self._threads = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._number = number
        self._what = what
        self._max_waiting = max_waiting
        self._turns = FairTurns[str, _Work]()
        self._running: Counter[str] = Counter()
        """The number of busy threads, by caller."""

    async def run(self, caller: str, cost: int, work: Callable[[], T]) -> T:
        """Runs `work` on a thread at the caller's turn. Returns what `work` returns, or raises what it raises.

        `cost` is charged to the caller, in any unit. If too much work waits, the latest work of the caller
        with the most waiting work gets Overloaded.
        """
        loop = asyncio.get_running_loop()
        waiting = _Work(caller, cost, loop.create_future())
        self._turns.add(caller, waiting)
        self._begin()
        if len(self._turns) > self._max_waiting and (last := self._turns.last_of_largest()):
            self._turns.discard(*last)
            self._refuse(last[1], f"{self._max_waiting} {self._what} wait, which is the limit")
        try:
            await waiting.turn
        except asyncio.CancelledError:
            self._turns.discard(caller, waiting)
            if not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self._end(caller)  # cancelled at the moment when its turn began
            raise
        try:
            running = self._threads.submit(work)
        except RuntimeError as error:  # the system has no thread left, or this gateway is stopping
            self._end(caller)
            raise Overloaded(f"cannot start a thread for {self._what}: {error}", RETRY_AFTER_S) from error

        def on_end(_: "Future[T]") -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, caller)

        running.add_done_callback(on_end)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Refuses waiting work. Running work continues to its end."""
        while (turn := self._turns.take_next()) is not None:
            self._refuse(turn[1], "this gateway is stopping")
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._running.total() < self._number:
            turn = self._turns.take_next(lambda caller: self._running[caller] < self._number - 1)
            if turn is None:
                return
            _, work = turn
            if work.turn.done():
                continue  # cancelled
            self._turns.charge(work.caller, work.cost)
            self._running[work.caller] += 1
            work.turn.set_result(None)

    def _end(self, caller: str) -> None:
        self._running[caller] -= 1
        self._running += Counter()  # drops callers with none
        self._begin()

    @staticmethod
    def _refuse(work: _Work, reason: str) -> None:
        if not work.turn.done():
            work.turn.set_exception(Overloaded(reason, RETRY_AFTER_S))
