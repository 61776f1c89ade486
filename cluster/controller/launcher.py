"""The seam between a controller and whatever runs its workers: Ray's actors, or child processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.fleet import NodeDescription
from baton.messages.control import ControlRequest
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole

R = TypeVar("R")

OnStartProgress = Callable[[StartProgress], None]


class Incarnation(Protocol):
    """One process that fills a replica, wherever it runs.

    Calls raise ClusterError if it is gone. The message has the reason alone; the caller adds the worker's name.
    """

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """1 for a worker's first incarnation; the latest is the highest."""
        ...

    @property
    def node(self) -> str:
        """The name of the machine that it was placed on."""
        ...

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        """Loads the model and binds the ports. Raises what the worker raised."""
        ...

    async def call(self, request: ControlRequest[R]) -> R:
        """Carries out one of WORKER_CALLS on a worker that was started.

        Raises the worker's error, and ClusterError, with the reason, as soon as the process dies. Does not return if
        the process hangs.
        """
        ...

    async def stop(self, timeout_s: float) -> None:
        """Ends the process: gently within the time, else, or with no time, by force. Gives its room back. Never raises.

        Right at any moment of an incarnation, and more than once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """An incarnation that another controller began."""

    incarnation: Incarnation
    endpoint: WorkerEndpoint
    """With the role that it has at present."""


class Launcher(Protocol):
    """Places workers. Its methods belong to one event loop."""

    async def place(self, name: str, role: WorkerRole, number: int) -> Incarnation:
        """Room and a process for the next incarnation of a worker; waits for as long as there is none.

        Cancelled, it leaves nothing behind. ClusterError if there is no hope.
        """
        ...

    async def has_room(self, role: WorkerRole) -> bool:
        """Whether one more worker would find room at once, as far as that can be known."""
        ...

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:
        """The workers that serve already, by name: of each the latest incarnation. Ends everything else of the fleet.

        So are those that do not answer within the time.
        """
        ...

    def avoid(self, nodes: Sequence[str]) -> None:
        """From now on nothing is placed on these nodes, by name, and on all others it may be."""
        ...

    async def nodes(self) -> tuple[NodeDescription, ...]: ...
