"""The seam between a controller and whatever runs its workers: Ray's actors, or child processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.fleet import NodeDescription
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole, WorkerStatus

OnStartProgress = Callable[[StartProgress], None]


class Life(Protocol):
    """One life of one worker: a process, wherever it runs.

    Calls raise ClusterError if it is gone, with the reason alone: whoever passes that on says which worker it was.
    """

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """1 for a worker's first life; the latest is the highest."""
        ...

    @property
    def node(self) -> str:
        """The name of the machine that it was placed on."""
        ...

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        """Loads the model and binds the ports. Raises what the worker raised."""
        ...

    async def status(self, after_s: float) -> WorkerStatus:
        """What the worker says of itself so much later; ClusterError, with the reason, as soon as it dies.

        Only for a life that was started. Does not return if the process hangs.
        """
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Gives away what the worker has, as EngineHost.drain does; True if nobody lost anything."""
        ...

    async def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        """FleetError if the worker remains what it was."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Ends the process: gently within the time, else, or with no time, by force. Gives its room back. Never raises.

        Right at any moment of a life, and more than once.
        """
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A life that another controller began."""

    life: Life
    endpoint: WorkerEndpoint
    """With the role that it has at present."""


class Launcher(Protocol):
    """Places workers. Its methods belong to one event loop."""

    async def place(self, name: str, role: WorkerRole, number: int) -> Life:
        """Room and a process for the next life of a worker; waits for as long as there is none.

        Cancelled, it leaves nothing behind. ClusterError if there is no hope.
        """
        ...

    async def has_room(self, role: WorkerRole) -> bool:
        """Whether one more worker would find room at once, as far as that can be known."""
        ...

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:
        """The workers that serve already, by name: of each the latest life. Everything else of the fleet is ended.

        So are those that do not answer within the time.
        """
        ...

    def avoid(self, nodes: Sequence[str]) -> None:
        """From now on nothing is placed on these nodes, by name, and on all others it may be."""
        ...

    async def nodes(self) -> tuple[NodeDescription, ...]: ...
