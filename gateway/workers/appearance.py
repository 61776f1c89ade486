"""A worker's state for views of the fleet: its own report, joined with its controller's."""

import re

from baton.fleet import ReplicaDescription, ReplicaState
from gateway.workers.worker_client import WorkerClient

_WITHOUT_PROCESS = {
    ReplicaState.PLACING,
    ReplicaState.STARTING,
    ReplicaState.BACKING_OFF,
    ReplicaState.CRASH_LOOP,
}
"""What the controller knows better than a worker's silence tells."""


def in_order(name: str) -> tuple[str, int, str]:
    """Sorts numbered names by their number: `w2` before `w10`."""
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2]), "") if match else (name, -1, name)


def state_of(client: WorkerClient, replica: ReplicaDescription | None) -> str:
    """Of a worker that this gateway knows."""
    if client.status is not None and not client.is_silent:
        return client.status.state.value
    if replica is not None and replica.state in _WITHOUT_PROCESS:
        return replica.state.value
    return "starting" if client.status is None else "dead"


def state_without_process(replica: ReplicaDescription) -> str:
    """Of a worker whose process the gateway does not know, if there is one."""
    state: ReplicaState = ReplicaState.STARTING if replica.state is ReplicaState.SERVING else replica.state
    return str(state.value)
