"""WorkerList: the workers that take requests at present, by their incarnations; pure, fed with their heartbeats."""

from dataclasses import dataclass

from baton.kv import WorkerRef
from baton.worker import WorkerRole, WorkerState, WorkerStatus


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One worker that takes requests, as of its latest heartbeat."""

    ref: WorkerRef
    role: WorkerRole
    heartbeat: int
    """Number of that heartbeat among all that were listed: a later one may report another state."""


class WorkerList:
    """Workers by name. Workers that take no requests are not listed."""

    def __init__(self) -> None:
        self._workers: dict[str, ListedWorker] = {}
        self._draining: set[str] = set()
        self._num_heartbeats = 0

    def update(self, status: WorkerStatus) -> None:
        self._num_heartbeats += 1
        if status.state is WorkerState.READY:
            self._workers[status.ref.name] = ListedWorker(status.ref, status.role, self._num_heartbeats)
        else:
            self.remove(status.ref.name)
        if status.state is WorkerState.DRAINING:
            self._draining.add(status.ref.name)

    def remove(self, name: str) -> None:
        """Unknown names are no error."""
        self._workers.pop(name, None)
        self._draining.discard(name)

    def is_draining(self, name: str) -> bool:
        """Whether the worker's latest heartbeat says that it drains, to end or to change its role."""
        return name in self._draining

    def get(self, name: str) -> ListedWorker | None:
        return self._workers.get(name)

    def num_of(self, role: WorkerRole) -> int:
        return sum(worker.role is role for worker in self._workers.values())
