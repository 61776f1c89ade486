"""What views of a fleet show: its controller's description, and each worker's own report combined with it."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from baton.errors import ClusterError, FleetError
from baton.fleet import FleetDescription, NodeDescription, ReplicaDescription, ReplicaState
from baton.messages.control import ControlApi, DescribeFleet
from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus
from gateway.workers.worker_client import WorkerClient

TIMEOUT_S = 1.0
"""A controller that answers later counts as unreachable. Then views contain only what the gateway itself knows."""

_WITHOUT_PROCESS = {
    ReplicaState.PLACING,
    ReplicaState.STARTING,
    ReplicaState.BACKING_OFF,
    ReplicaState.CRASH_LOOP,
}
"""States of the controller that replace the gateway's own state of a worker that it cannot reach. Without the
controller, the gateway would show `dead` or `starting`."""


@dataclass(frozen=True, slots=True)
class ControllerView:
    """The answer of the fleet's controller to a gateway, or why there is no answer."""

    state: Literal["none", "answering", "away"]
    fleet: FleetDescription | None = None
    failure: str = ""

    @property
    def replicas(self) -> tuple[ReplicaDescription, ...]:
        return self.fleet.replicas if self.fleet else ()

    @property
    def nodes(self) -> tuple[NodeDescription, ...]:
        return self.fleet.nodes if self.fleet else ()


async def ask_controller(control: ControlApi | None) -> ControllerView:
    """Asks the controller for the fleet's description. Returns within TIMEOUT_S."""
    if control is None:
        return ControllerView("none")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return ControllerView("answering", await control.call(DescribeFleet()))
    except TimeoutError:
        return ControllerView("away", failure=f"no answer within {TIMEOUT_S:g} s")
    except (FleetError, ClusterError) as error:
        return ControllerView("away", failure=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker that runs, or that its controller wants to run."""

    name: str
    role: WorkerRole
    state: str
    """`starting`, `ready`, `draining`, `stopped`, `hung` or `dead`. Without a process: `placing`,
    `backing_off` or `crash_loop`."""
    node: str
    endpoint: WorkerEndpoint | None = None
    """None if this gateway knows no process of the worker."""
    status: WorkerStatus | None = None
    """The status in the latest heartbeat; None before the first heartbeat."""
    replica: ReplicaDescription | None = None
    """None if no controller describes the worker."""


def views_of(clients: Iterable[WorkerClient], replicas: Iterable[ReplicaDescription]) -> list[WorkerView]:
    """All workers that run, or that a controller wants to run, sorted by name: `w2` before `w10`."""
    missing = {replica.name: replica for replica in replicas}
    views = [_of_client(client, missing.pop(client.name, None)) for client in clients]
    views += [_of_replica(replica) for replica in missing.values()]
    return sorted(views, key=lambda view: name_key(view.name))


def name_key(name: str) -> tuple[str, int, str]:
    """The sort key of a name. Numbered names are sorted by their number: `w2` before `w10`."""
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2]), "") if match else (name, -1, name)


def _of_client(client: WorkerClient, replica: ReplicaDescription | None) -> WorkerView:
    state = client.state.value
    is_reachable = client.status is not None and not client.is_lost
    if not is_reachable and replica is not None and replica.state in _WITHOUT_PROCESS:
        state = replica.state.value
    return WorkerView(
        name=client.name,
        role=client.role,
        state=state,
        node=client.endpoint.node,
        endpoint=client.endpoint,
        status=client.status,
        replica=replica,
    )


def _of_replica(replica: ReplicaDescription) -> WorkerView:
    state = ReplicaState.STARTING if replica.state is ReplicaState.SERVING else replica.state
    return WorkerView(
        name=replica.name, role=replica.role, state=state.value, node=replica.node, replica=replica
    )
