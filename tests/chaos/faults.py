"""What goes wrong, and how: processes are killed, stopped for a while, or restarted gently, in a seeded order."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import psutil

from gateway.client import GatewayClient, GatewayError
from tests.chaos.machines import Machines
from tests.chaos.main_thread import MainThread

STANDSTILL_S = (0.5, 9.0)
"""Up to longer than any peer's patience, so that both a pause and a presumed death are met."""

Fault = Callable[[], Awaitable[str | None]]


class Faults:
    """Draws and commits faults. What is stopped goes on by itself; what is killed is for the cluster to replace."""

    def __init__(
        self,
        machines: Machines,
        main_thread: MainThread,
        client: GatewayClient,
        rng: random.Random,
        every_s: float,
    ) -> None:
        """One fault every `every_s`, give or take half of it."""
        self._machines = machines
        self._main_thread = main_thread
        self._client = client
        self._rng = rng
        self._every_s = every_s
        self._standing: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._menu: list[tuple[int, str, Fault]] = [
            (5, "kill worker", self._kill_worker),
            (3, "stop worker", self._stop_worker),
            (2, "restart worker", self._restart_worker),
            (2, "kill controller", self._kill_controller),
            (1, "stop controller", self._stop_controller),
            (2, "kill raylet", self._kill_raylet),
            (1, "stop raylet", self._stop_raylet),
        ]

    async def run(self) -> None:
        """One fault after the other, until cancelled."""
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
        """Everything that stands still goes on, and every node is there again."""
        await asyncio.gather(*self._standing)
        await self._main_thread.run(self._machines.replenish)

    async def _kill_worker(self) -> str | None:
        name, pid = await self._draw_worker()
        return name if name and _signal(pid, signal.SIGKILL) else None

    async def _stop_worker(self) -> str | None:
        name, pid = await self._draw_worker()
        return name if name and self._stand_still(pid) else None

    async def _restart_worker(self) -> str | None:
        """As an operator would, while other things go wrong."""
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
        """Something that takes its time; see `settle`."""
        task = asyncio.create_task(work)
        self._standing.add(task)
        task.add_done_callback(self._standing.discard)

    async def _draw_worker(self) -> tuple[str | None, int]:
        workers = (await self._client.describe())["workers"]
        alive = [(worker["name"], worker["pid"]) for worker in workers if worker["pid"]]
        return self._rng.choice(alive) if alive else (None, 0)

    def _controller_pid(self) -> int | None:
        """By the name that Ray gives to an actor's process."""
        for process in self._machines.processes():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Controller"):
                    return process.pid
            except psutil.Error:
                continue
        return None


def _signal(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


async def _go_on_later(pid: int, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pid, signal.SIGCONT)
