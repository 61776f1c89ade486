"""The seam between the gateway, where operators' calls arrive, and whoever owns the workers' processes."""

from collections.abc import AsyncIterator
from typing import Protocol

from baton.fleet import FleetDescription, RolloutStep
from baton.worker import WorkerRole


class FleetControl(Protocol):
    """Every call raises FleetError if the answer is no, and ClusterError if nobody is there to answer."""

    async def describe(self) -> FleetDescription: ...

    async def drain(self, worker: str) -> None:
        """Returns once the worker has given away what it had, and is gone for good."""
        ...

    async def drain_node(self, node: str, timeout_s: float) -> None:
        """Returns once the node of this address or name has no workers, and will have none; FleetError if that takes
        longer."""
        ...

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        """Returns once the worker serves in its new role; if it cannot, it serves in its old one, and this raises."""
        ...

    def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        """Restarts these workers, or all, one after the other; yields as each new life serves."""
        ...
