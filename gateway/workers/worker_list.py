"""WorkerList: the workers that accept requests at present, learned from their heartbeats; pure."""

from dataclasses import dataclass

from baton.kv import WorkerRef
from baton.worker import WorkerRole, WorkerState, WorkerStatus


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One worker that accepts requests, according to its latest heartbeat."""

    ref: WorkerRef
    role: WorkerRole
    heartbeat: int
    """Number of the worker's latest heartbeat, counted over all workers. It changes with each heartbeat."""


class WorkerList:
    """Workers by name. Workers that accept no requests are not listed."""

    def __init__(self) -> None:
        self._workers: dict[str, ListedWorker] = {}
        self._draining: set[str] = set()
        self._num_heartbeats = 0

    def update(self, status: WorkerStatus) -> None:
        self._num_heartbeats += 1
        self.remove(status.ref.name)
        if status.state is WorkerState.READY:
            self._workers[status.ref.name] = ListedWorker(status.ref, status.role, self._num_heartbeats)
        elif status.state is WorkerState.DRAINING:
            self._draining.add(status.ref.name)

    def remove(self, name: str) -> None:
        """Removes a worker. Unknown names are ignored."""
        self._workers.pop(name, None)
        self._draining.discard(name)

    def is_draining(self, name: str) -> bool:
        """Whether the worker reported that it drains, in order to end or to change its role."""
        return name in self._draining

    def get(self, name: str) -> ListedWorker | None:
        return self._workers.get(name)

    def num_of(self, role: WorkerRole) -> int:
        return sum(worker.role is role for worker in self._workers.values())
