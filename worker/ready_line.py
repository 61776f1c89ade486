"""The line in which a worker process reports where it serves, or why it cannot; encodes and decodes it."""

import json

from pydantic import TypeAdapter

from baton.errors import BatonError, ConfigError, ModelError, WorkerUnavailable
from baton.worker import WorkerEndpoint

_ENDPOINT = TypeAdapter(WorkerEndpoint)


def endpoint_to_json(endpoint: WorkerEndpoint) -> str:
    return _ENDPOINT.dump_json(endpoint).decode()


def failure_to_json(error: BatonError) -> str:
    """Sent instead of an endpoint if the worker cannot start."""
    return json.dumps({"failure": str(error), "kind": type(error).__name__})


def endpoint_from_json(line: str) -> WorkerEndpoint:
    """The inverse of `endpoint_to_json`, for the parent process.

    Raises the error of a worker that could not start: ConfigError, ModelError, or WorkerUnavailable for the rest.
    """
    values = json.loads(line)
    if "failure" in values:
        kinds = {kind.__name__: kind for kind in (ConfigError, ModelError)}
        raise kinds.get(values["kind"], WorkerUnavailable)(values["failure"])
    return _ENDPOINT.validate_python(values)
