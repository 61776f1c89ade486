"""A fleet of child processes on this machine, with its controller in this process: `baton serve` without Ray.

The workers end with this process, so none is ever adopted.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import ClusterError, WorkerUnavailable
from baton.fleet import NodeDescription
from baton.messages.control import ControlApi, ControlRequest
from baton.system.awake_timer import awake_timeout
from baton.system.cpus import find_machine
from baton.system.curve import ClusterSecret, derive_keys
from baton.system.no_room import REMEDY
from baton.system.signals import unless
from baton.system.tasks import end_tasks
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.control_api.calls import InProcessControl
from cluster.control_api.configuration import keys_digest, pack_configuration
from cluster.control_api.owner import OnProgress, OnServing, first_start
from cluster.controller.controller import Controller
from cluster.controller.cpu_shares import CpuShares
from cluster.controller.desired import InMemoryStore
from cluster.controller.launcher import Found, OnStartProgress
from cluster.processes.worker_process import WorkerProcess, how_it_ended
from worker.control_channel import StdioControlClient

R = TypeVar("R")

_NODE = "here"
_EXIT_S = 1.0
"""How long a process may take to end after it has closed its stdout."""


class ProcessFleet:
    """See cluster.serve.owned_fleet.Fleet. The workers end with this process, even on SIGKILL."""

    def __init__(self, config: BatonConfig, secret: ClusterSecret | None, model_path: Path) -> None:
        self._start_timeout_s = config.cluster.start_timeout_s
        self.launcher = ProcessLauncher(config, model_path, secret)
        self.controller = Controller(config, self.launcher, InMemoryStore(), SystemClock())
        digest = keys_digest(derive_keys(secret))
        self._control = InProcessControl(self.controller, pack_configuration(config, model_path, digest))
        self._has_started = False

    async def start(self, on_progress: OnProgress, on_serving: OnServing | None = None) -> InProcessControl:
        await self.controller.start()
        shortage = "no worker could be started"
        on_enough = on_serving and partial(self._on_enough, on_serving)
        await first_start(self._control, self._start_timeout_s, shortage, on_progress, on_enough)
        self._has_started = True
        return self._control

    async def _on_enough(self, on_serving: OnServing, control: ControlApi) -> None:
        self._has_started = True
        await on_serving(control)

    async def end(self, hurry: asyncio.Event) -> None:
        if not self._has_started or not await unless(hurry, self._control.end(may_drain=True)):
            await self._control.end(may_drain=False)


class ProcessIncarnation:
    """One process. See cluster.controller.launcher.Incarnation."""

    def __init__(self, process: WorkerProcess, number: int) -> None:
        self.number = number
        self.node = socket.gethostname()
        self.process = process
        self._control: StdioControlClient | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=f"worker {process.name}")
        try:
            self._exit = asyncio.get_running_loop().run_in_executor(self._threads, process.wait)
        except RuntimeError as error:  # nothing would notice that the process ends
            process.kill()
            process.wait()
            process.close()
            raise _no_thread(error) from error

    @property
    def name(self) -> str:
        return self.process.name

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:  # noqa: ARG002 (the worker logs its progress)
        try:
            endpoint = await asyncio.get_running_loop().run_in_executor(
                self._threads, self.process.wait_until_ready
            )
            self._control = self.process.control()
        except WorkerUnavailable as error:
            raise ClusterError(str(error)) from None
        except RuntimeError as error:
            raise _no_thread(error) from error
        return endpoint

    async def call(self, request: ControlRequest[R]) -> R:
        assert self._control is not None, f"worker {self.name} was not started"
        asking = asyncio.ensure_future(self._control.call(request))
        both: list[asyncio.Future[Any]] = [asking, self._exit]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._control.is_gone:
                await self._exits_within(_EXIT_S)
            if self._exit.done():
                raise ClusterError(how_it_ended(self._exit.result()))
            return await asking
        finally:
            await end_tasks(asking)

    async def stop(self, timeout_s: float) -> None:
        if self._control is not None and timeout_s > 0:
            self.process.ask_to_end()
            await self._exits_within(timeout_s)
        if not self._exit.done():
            self.process.kill()
        await asyncio.wait([self._exit])
        self._threads.shutdown(wait=False)
        self.process.close()

    @property
    def is_over(self) -> bool:
        return self._exit.done()

    async def _exits_within(self, timeout_s: float) -> None:
        """Returns when the process has ended, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with awake_timeout(timeout_s):
                await asyncio.wait([self._exit])


def _no_thread(error: RuntimeError) -> ClusterError:
    return ClusterError(f"cannot start a thread to watch its process: {error}; {REMEDY}")


class ProcessLauncher:
    """See cluster.controller.launcher.Launcher. Every worker has room, but not for a second incarnation."""

    def __init__(self, config: BatonConfig, model_path: Path, secret: ClusterSecret | None) -> None:
        self._config = config
        self._model_path = model_path
        self._secret = secret
        self._machine = find_machine()
        self._shares = CpuShares(config)
        self.incarnations: dict[str, ProcessIncarnation] = {}
        """The latest incarnation of each worker, by name; `place` drops those that have ended."""

    async def place(self, name: str, role: WorkerRole, number: int) -> ProcessIncarnation:
        alive = {other: each for other, each in self.incarnations.items() if not each.is_over}
        share = self._shares.reserve(name, role, _NODE, self._machine, alive)
        try:
            process = WorkerProcess(self._config, self._model_path, self._secret, role, name, None, share)
        except OSError as error:
            raise ClusterError(f"cannot start its process: {error}; {REMEDY}") from error
        incarnation = ProcessIncarnation(process, number)
        self.incarnations = {**alive, name: incarnation}
        return incarnation

    async def has_room(self, role: WorkerRole) -> bool:  # noqa: ARG002
        return False

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:  # noqa: ARG002
        return {}

    def avoid(self, nodes: Sequence[str]) -> None:
        assert not nodes, "the only machine cannot drain"

    def forget(self, name: str) -> None:
        self._shares.forget(name)

    async def nodes(self) -> tuple[NodeDescription, ...]:
        node = NodeDescription(
            name=socket.gethostname(),
            address="127.0.0.1",
            is_alive=True,
            is_head=True,
            workers=tuple(
                sorted(name for name, incarnation in self.incarnations.items() if not incarnation.is_over)
            ),
        )
        return (node,)
