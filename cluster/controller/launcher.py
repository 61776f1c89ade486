"""The interface between a controller and the runtime of its workers: Ray actors or child processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.errors import ClusterError
from baton.fleet import NodeDescription
from baton.messages.control import ControlRequest
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole, WorkerState, WorkerStatus

R = TypeVar("R")

OnStartProgress = Callable[[StartProgress], None]


class NodeDrains(ClusterError):
    """The node of an incarnation began to drain before the incarnation served. The next one may begin at once."""


class Incarnation(Protocol):
    """One process that fills a replica.

    Calls raise ClusterError if the process has ended. The message is the reason; the caller adds the worker's name.
    """

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """1 for a worker's first incarnation, then 2, and so on."""
        ...

    @property
    def node(self) -> str:
        """The name of the process's node."""
        ...

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        """Loads the model and binds the ports. Raises the worker's error."""
        ...

    async def call(self, request: ControlRequest[R]) -> R:
        """Carries out one of WORKER_CALLS on a worker that was started.

        Raises the worker's error, or ClusterError, with the reason, as soon as the process dies. Does not return if the
        process hangs.
        """
        ...

    async def stop(self, timeout_s: float) -> None:
        """Ends the process, after `timeout_s` by force, and frees its room. Never raises.

        May be called at any time, and more than once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """An incarnation that has started. `Launcher.adopt` returns those that a former controller began."""

    incarnation: Incarnation
    endpoint: WorkerEndpoint
    """The worker's endpoint, with its present role."""
    status: WorkerStatus | None = None
    """The status of a worker that `adopt` found, as of that moment."""

    @property
    def is_leaving(self) -> bool:
        """Whether the worker drains or changes its role, as a former controller commanded."""
        return self.status is not None and self.status.state is WorkerState.DRAINING


class Launcher(Protocol):
    """Places workers. All methods belong to one event loop."""

    async def place(self, name: str, role: WorkerRole, number: int) -> Incarnation:
        """Finds room and starts a process for a worker's next incarnation; waits while there is no room.

        A cancelled call leaves nothing behind. Raises ClusterError if waiting cannot help, and NodeDrains if `avoid`
        was called for the node of the process meanwhile.
        """
        ...

    async def has_room(self, role: WorkerRole) -> bool:
        """Whether one more worker would probably find room at once."""
        ...

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:
        """The latest incarnation of each worker that already serves, by name.

        Ends all other processes of the fleet, including workers that do not answer within `patience_s`.
        """
        ...

    def avoid(self, nodes: Sequence[str]) -> None:
        """From now on, no worker is placed on these nodes."""
        ...

    def forget(self, name: str) -> None:
        """There will be no further incarnation of this worker, and the last one has ended."""
        ...

    async def nodes(self) -> tuple[NodeDescription, ...]: ...
