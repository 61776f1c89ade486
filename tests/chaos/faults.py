"""The faults: processes are killed, stopped, slowed, broken or restarted gently, in an order drawn from a seed."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gateway.client import GatewayClient, GatewayError
from tests.chaos.machines import Machines
from tests.chaos.main_thread import MainThread
from tests.factories.sabotage import order

STANDSTILL_S = (0.5, 9.0)
"""Up to longer than any peer's patience, so that both a pause and a presumed death are met."""

SLICE_S = 0.1
"""How long a slow worker runs at a time."""

Fault = Callable[[], Awaitable[str | None]]


class Faults:
    """Draws and causes faults. Stopped processes continue later; the cluster must replace killed processes."""

    def __init__(
        self,
        machines: Machines,
        main_thread: MainThread,
        client: GatewayClient,
        rng: random.Random,
        every_s: float,
        sabotage: Path,
        kinds: Collection[str] = (),
    ) -> None:
        """Causes a fault of these kinds, or of any kind, every 0.5 to 1.5 times `every_s`. Workers read their orders
        from the folder `sabotage`."""
        self._machines = machines
        self._main_thread = main_thread
        self._client = client
        self._rng = rng
        self._every_s = every_s
        self._sabotage = sabotage
        self._standing: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        menu: list[tuple[int, str, Fault]] = [
            (5, "kill worker", self._kill_worker),
            (3, "stop worker", self._stop_worker),
            (2, "restart worker", self._restart_worker),
            (2, "kill controller", self._kill_controller),
            (1, "stop controller", self._stop_controller),
            (2, "kill raylet", self._kill_raylet),
            (1, "stop raylet", self._stop_raylet),
            (2, "hang worker", partial(self._break_worker, "hang")),
            (2, "spoil worker", partial(self._break_worker, "spoil")),
            (2, "slow worker", self._slow_worker),
        ]
        if unknown := set(kinds) - {name for _, name, _ in menu}:
            raise ValueError(f"no such faults: {sorted(unknown)}; there are {[name for _, name, _ in menu]}")
        self._menu = [entry for entry in menu if not kinds or entry[1] in kinds]

    async def run(self) -> None:
        """Causes one fault after another, until cancelled."""
        weights = [weight for weight, _, _ in self._menu]
        while True:
            await asyncio.sleep(self._rng.uniform(0.5 * self._every_s, 1.5 * self._every_s))
            await self._main_thread.run(self._machines.replenish)
            ((_, name, fault),) = self._rng.choices(self._menu, weights)
            victim = await fault()
            if victim is not None:
                self.counts[name] += 1
                self.log.append(f"{name} {victim}")

    async def settle(self) -> None:
        """Lets all stopped processes continue, and replaces lost nodes."""
        await asyncio.gather(*self._standing)
        await self._main_thread.run(self._machines.replenish)

    async def _kill_worker(self) -> str | None:
        name, pid = await self._draw_worker()
        return name if name and _signal(pid, signal.SIGKILL) else None

    async def _stop_worker(self) -> str | None:
        name, pid = await self._draw_worker()
        return name if name and self._stand_still(pid) else None

    async def _break_worker(self, kind: str) -> str | None:
        """Breaks a worker: its process runs and answers, but its steps never end, or compute NaN."""
        name, pid = await self._draw_worker()
        if name is not None:
            order(self._sabotage, pid, kind)
        return name

    async def _slow_worker(self) -> str | None:
        """Lets a worker run only a fifth of the time, for a while."""
        name, pid = await self._draw_worker()
        if name is not None:
            self._stand(_slow_down(pid, self._rng.uniform(*STANDSTILL_S)))
        return name

    async def _restart_worker(self) -> str | None:
        """Restarts a worker as an operator would, during other faults."""
        name, _ = await self._draw_worker()
        if name is None:
            return None
        self._stand(self._renew(name))
        return name

    async def _renew(self, name: str) -> None:
        try:
            async for _ in self._client.rollout([name]):
                pass
        except GatewayError as error:
            self.log.append(f"the restart of {name} came to nothing: {error}")

    async def _kill_controller(self) -> str | None:
        pid = self._controller_pid()
        return str(pid) if pid is not None and _signal(pid, signal.SIGKILL) else None

    async def _stop_controller(self) -> str | None:
        pid = self._controller_pid()
        return str(pid) if pid is not None and self._stand_still(pid) else None

    async def _kill_raylet(self) -> str | None:
        pid = self._rng.choice(self._machines.raylet_pids)
        await self._main_thread.run(partial(self._machines.kill, pid))
        return str(pid)

    async def _stop_raylet(self) -> str | None:
        pid = self._rng.choice(self._machines.raylet_pids)
        return str(pid) if self._stand_still(pid) else None

    def _stand_still(self, pid: int) -> bool:
        if not _signal(pid, signal.SIGSTOP):
            return False
        self._stand(_go_on_later(pid, self._rng.uniform(*STANDSTILL_S)))
        return True

    def _stand(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a fault that lasts for a while; see `settle`."""
        task = asyncio.create_task(work)
        self._standing.add(task)
        task.add_done_callback(self._standing.discard)

    async def _draw_worker(self) -> tuple[str | None, int]:
        workers = (await self._client.describe())["workers"]
        alive = [(worker["name"], worker["pid"]) for worker in workers if worker["pid"]]
        return self._rng.choice(alive) if alive else (None, 0)

    def _controller_pid(self) -> int | None:
        """The controller's process, found by the name that Ray gives to an actor's process."""
        for process in self._machines.processes():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Controller"):
                    return process.pid
            except psutil.Error:
                continue
        return None


def _signal(pid: int, number: signal.Signals) -> bool:
    """Sends the signal. Returns whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


async def _slow_down(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and _signal(pid, signal.SIGSTOP):
        await _go_on_later(pid, 4 * SLICE_S)
        await asyncio.sleep(SLICE_S)


async def _go_on_later(pid: int, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pid, signal.SIGCONT)
