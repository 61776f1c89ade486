"""WorkerList: which workers there are at present, and in which incarnation; pure, fed with what they report."""

from dataclasses import dataclass

from baton.worker import WorkerRole, WorkerState, WorkerStatus


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """One worker that takes requests, as of its last sign of life."""

    incarnation: str
    role: WorkerRole
    num_heard: int
    """Signs of life so far; what it said before the latest is old."""


class WorkerList:
    """Workers by name. Those that do not take requests are not on it."""

    def __init__(self) -> None:
        self._lives: dict[str, ListedWorker] = {}
        self._leaving: set[str] = set()
        self._num_heard = 0

    def heard(self, status: WorkerStatus) -> None:
        self._num_heard += 1
        if status.state is WorkerState.READY:
            self._lives[status.ref.name] = ListedWorker(status.ref.incarnation, status.role, self._num_heard)
        else:
            self.gone(status.ref.name)
        if status.state is WorkerState.DRAINING:
            self._leaving.add(status.ref.name)

    def gone(self, name: str) -> None:
        """Unknown names are no error."""
        self._lives.pop(name, None)
        self._leaving.discard(name)

    def is_leaving(self, name: str) -> bool:
        """Whether its last word was that it takes nothing more, since it was asked to end or to change its role."""
        return name in self._leaving

    def get(self, name: str) -> ListedWorker | None:
        return self._lives.get(name)

    def num_of(self, role: WorkerRole) -> int:
        return sum(life.role is role for life in self._lives.values())
