"""What a fleet's controller answers to those outside its process, and how long they wait; knows no connection."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from baton.config import BatonConfig
from baton.fleet import FleetDescription, RolloutStep
from baton.worker import WorkerRole
from cluster.controller.follower import ReportSink, ViewSource
from cluster.controller.rollout import RolloutSource


class ControllerCalls(ViewSource, ReportSink, RolloutSource, Protocol):
    """A controller, or a handle to one: what gateways and operators may ask.

    Every call raises FleetError if the answer is no, ClusterError if nobody is there to answer, and FleetEnded if
    nobody ever will be.
    """

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

    async def scale(self, role: WorkerRole, count: int) -> None:
        """So many workers of a role: new ones begin to start, or the least busy are drained, which is waited for."""
        ...

    def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        """Restarts these workers, or all, one after the other; yields as each new life serves."""
        ...


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long whoever asks a controller waits for what takes its time, in seconds."""

    order_s: float
    """For a drain, or a change of role."""
    renew_s: float
    """For one step of a rollout."""
    unresponsive_s: float
    """Beyond what it was asked to wait for; a controller that is silent for longer hangs."""

    @classmethod
    def of(cls, config: BatonConfig) -> "CallTimes":
        cluster = config.cluster
        leave_s = cluster.drain_timeout_s + 2 * config.kv_transfer.lease_s + cluster.unresponsive_timeout_s
        order_s = 2 * leave_s
        return cls(order_s, order_s + 2 * cluster.start_timeout_s, cluster.unresponsive_timeout_s)
