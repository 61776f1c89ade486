"""The line in which a worker process reports where it serves, or why it cannot; encodes and decodes it."""

import json

from pydantic import TypeAdapter

from baton.errors import BatonError, ConfigError, ModelError, WorkerUnavailable
from baton.messages.control import CONTROL_PLANE_VERSION
from baton.worker import WorkerEndpoint

_ENDPOINT = TypeAdapter(WorkerEndpoint)


def endpoint_to_json(endpoint: WorkerEndpoint) -> str:
    values = _ENDPOINT.dump_python(endpoint, mode="json")
    return json.dumps({"fleet_plane": CONTROL_PLANE_VERSION, **values})


def failure_to_json(error: BatonError) -> str:
    """The line that is sent instead of an endpoint if the worker cannot start."""
    return json.dumps({"failure": str(error), "kind": type(error).__name__})


def endpoint_from_json(line: str) -> WorkerEndpoint:
    """The inverse of `endpoint_to_json`, for the parent process.

    Raises the error of a worker that could not start: ConfigError, ModelError, or WorkerUnavailable for all other
    causes. Also raises WorkerUnavailable for a worker of another version: Baton was updated after the parent had
    started.
    """
    values = json.loads(line)
    if "failure" in values:
        kinds = {kind.__name__: kind for kind in (ConfigError, ModelError)}
        raise kinds.get(values["kind"], WorkerUnavailable)(values["failure"])
    if (version := values.pop("fleet_plane", None)) != CONTROL_PLANE_VERSION:
        raise WorkerUnavailable(
            f"it runs {f'version {version}' if version else 'an unknown version'} of the control plane, and the "
            f"command that started it version {CONTROL_PLANE_VERSION}: Baton was replaced on this machine; restart the "
            "command"
        )
    return _ENDPOINT.validate_python(values)
