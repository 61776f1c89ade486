"""RoleChanges: the running changes of workers' roles, each of which several callers may wait for; knows no process."""

import asyncio
import logging
from collections.abc import Callable

from baton.worker import WorkerRole
from cluster.controller.desired import DesiredReplica
from cluster.controller.supervisor import Supervisor

logger = logging.getLogger(__name__)


class RoleChanges:
    """Belongs to a controller's event loop. A change continues if its callers disconnect."""

    def __init__(self, save: Callable[[], None]) -> None:
        """`save` stores the desired fleet."""
        self._save = save
        self._running: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._running

    def begin(self, replica: DesiredReplica, supervisor: Supervisor, role: WorkerRole) -> None:
        """Begins to change the role of a worker. This role is its desired one from now on, unless the change fails."""
        replica.role = role
        self._save()
        change = self._change(replica, supervisor, role)
        self._running[replica.name] = asyncio.create_task(change, name=f"change the role of {replica.name}")

    def resume(self, replica: DesiredReplica, supervisor: Supervisor) -> None:
        """Continues a change that a former controller began. Logs an error: nobody may wait for this change."""
        self.begin(replica, supervisor, replica.role)
        self._running[replica.name].add_done_callback(_log_error)

    async def join(self, worker: str) -> None:
        """Returns when the worker's running change has ended. Raises FleetError if the worker keeps its old role."""
        await asyncio.shield(self._running[worker])

    async def stop(self) -> None:
        """Cancels all running changes."""
        running = list(self._running.values())
        for change in running:
            change.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _change(self, replica: DesiredReplica, supervisor: Supervisor, role: WorkerRole) -> None:
        try:
            await supervisor.set_role(role)
        finally:
            replica.role = supervisor.replica.role
            del self._running[replica.name]
            self._save()


def _log_error(change: asyncio.Task[None]) -> None:
    if not change.cancelled() and (error := change.exception()) is not None:
        logger.warning("%s", error)
