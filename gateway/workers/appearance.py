"""How a worker appears to those who look at the fleet: its own word, joined with its controller's."""

import re

from baton.fleet import SlotDescription, SlotState
from gateway.workers.worker_client import WorkerClient

_WITHOUT_PROCESS = {SlotState.PLACING, SlotState.STARTING, SlotState.BACKING_OFF, SlotState.CRASH_LOOP}
"""What the controller knows better than a worker's silence tells."""


def in_order(name: str) -> tuple[str, int, str]:
    """Sorts numbered names by their number: `w2` before `w10`."""
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2]), "") if match else (name, -1, name)


def state_of(client: WorkerClient, slot: SlotDescription | None) -> str:
    """Of a worker that this gateway knows."""
    if client.status is not None and not client.is_silent:
        return client.status.state.value
    if slot is not None and slot.state in _WITHOUT_PROCESS:
        return slot.state.value
    return "starting" if client.status is None else "dead"


def state_without_process(slot: SlotDescription) -> str:
    """Of a worker whose process the gateway does not know, if there is one."""
    state: SlotState = SlotState.STARTING if slot.state is SlotState.SERVING else slot.state
    return str(state.value)
