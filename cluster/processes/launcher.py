"""Workers of a fleet as child processes on this machine; they end with this process, so there is never one to adopt."""

import asyncio
import signal
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.errors import ClusterError, WorkerUnavailable
from baton.fleet import NodeDescription
from baton.system.curve import ClusterSecret
from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus
from cluster.controller.launcher import Found, OnStartProgress
from cluster.processes.child_processes import WorkerProcess
from worker.control_channel import ControlChannel


class ProcessLife:
    """One process. See cluster.controller.launcher.Life."""

    def __init__(self, process: WorkerProcess, number: int) -> None:
        self.number = number
        self.node = socket.gethostname()
        self.process = process
        self._channel: ControlChannel | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=f"life of {process.name}")
        self._exit = asyncio.get_running_loop().run_in_executor(self._threads, process.wait)

    @property
    def name(self) -> str:
        return self.process.name

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:  # noqa: ARG002 (it goes to the log)
        try:
            endpoint = await asyncio.get_running_loop().run_in_executor(
                self._threads, self.process.wait_until_ready
            )
        except WorkerUnavailable as error:
            raise ClusterError(str(error)) from None
        self._channel = self.process.control()
        return endpoint

    async def status(self, after_s: float) -> WorkerStatus:
        await asyncio.wait([self._exit], timeout=after_s)
        if self._exit.done():
            raise ClusterError(f"its process ended with {self._exit.result()}")
        return await self._control().status()

    async def drain(self, timeout_s: float) -> bool:
        return await self._control().drain(timeout_s)

    async def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        await self._control().set_role(role, timeout_s)

    async def stop(self, timeout_s: float) -> None:
        if self._channel is not None and timeout_s > 0:
            self.process.ask_to_end()
            await asyncio.wait([self._exit], timeout=timeout_s)
        if not self._exit.done():
            self.process.send_signal(signal.SIGKILL)
        await asyncio.wait([self._exit])
        self._threads.shutdown(wait=False)
        self.process.close()

    @property
    def is_over(self) -> bool:
        return self._exit.done()

    def _control(self) -> ControlChannel:
        assert self._channel is not None, f"worker {self.name} was not started"
        return self._channel


class ProcessLauncher:
    """See cluster.controller.launcher.Launcher. There is room for any number of workers, but never for a spare one."""

    def __init__(self, config_path: Path, secret: ClusterSecret | None) -> None:
        self._config_path = config_path
        self._secret = secret
        self.lives: dict[str, ProcessLife] = {}
        """The latest of each worker, by name."""

    async def place(self, name: str, role: WorkerRole, number: int) -> ProcessLife:
        life = ProcessLife(WorkerProcess(self._config_path, self._secret, role, name, None), number)
        self.lives[name] = life
        return life

    async def has_room(self, role: WorkerRole) -> bool:  # noqa: ARG002
        return False

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:  # noqa: ARG002
        return {}

    def avoid(self, nodes: Sequence[str]) -> None:
        assert not nodes, "this machine is all there is, so it cannot leave"

    async def nodes(self) -> tuple[NodeDescription, ...]:
        node = NodeDescription(
            name=socket.gethostname(),
            address="127.0.0.1",
            is_alive=True,
            is_head=True,
            workers=tuple(sorted(name for name, life in self.lives.items() if not life.is_over)),
        )
        return (node,)
