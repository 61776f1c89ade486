"""The line in which a worker process reports where it serves, or why it cannot."""

import json

import pytest

from baton.errors import BatonError, ConfigError, ModelError, WorkerUnavailable
from baton.kv import WorkerRef
from baton.messages.control import CONTROL_PLANE_VERSION
from baton.worker import WorkerEndpoint, WorkerRole
from worker.ready_line import endpoint_from_json, endpoint_to_json, failure_to_json

ENDPOINT = WorkerEndpoint(
    WorkerRef("w1", "a", ("tcp://127.0.0.1:1",), 16),
    WorkerRole.DECODE,
    "tcp://127.0.0.1:2",
    "here",
    7,
    cpus=(0, 3),
)


def test_an_endpoint_arrives_as_it_was() -> None:
    assert endpoint_from_json(endpoint_to_json(ENDPOINT)) == ENDPOINT


@pytest.mark.parametrize("kind", [ConfigError, ModelError, WorkerUnavailable])
def test_an_error_keeps_its_type(kind: type[BatonError]) -> None:
    with pytest.raises(kind, match=r"no config\.json"):
        endpoint_from_json(failure_to_json(kind("no config.json")))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [(CONTROL_PLANE_VERSION + 1, f"version {CONTROL_PLANE_VERSION + 1}"), (None, "an unknown version")],
)
def test_a_worker_of_another_version_does_not_serve(theirs: int | None, named: str) -> None:
    """A rollout after an update of the package would replace every worker by one that no gateway can use."""
    values = json.loads(endpoint_to_json(ENDPOINT)) | {"fleet_plane": theirs}
    found = f"runs {named} of the control plane.*replaced on this machine.*restart the command"
    with pytest.raises(WorkerUnavailable, match=found):
        endpoint_from_json(json.dumps({key: value for key, value in values.items() if value is not None}))
