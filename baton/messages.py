"""The request plane: every message between a gateway and a worker, as a typed value."""

from dataclasses import dataclass

from baton.request import EngineRequest, RequestOutput
from baton.wire import Codec
from baton.worker import WorkerStatus


@dataclass(frozen=True, slots=True)
class Hello:
    """Gateway -> worker, first and then at a fixed pace: I am here; send me outputs and heartbeats.

    A gateway silent for longer than the worker's limit is gone, and its requests are aborted.
    """

    incarnation: str
    """The life of the worker that the gateway means; another life answers with its own status and nothing else."""
    session: int | None
    """The worker's last word on it; None before the first. See baton/session.py."""
    num_orders: int
    """SubmitRequests and AbortRequests in this session so far: if the worker has another number, some were lost."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Gateway -> worker: one leg of a request."""

    request: EngineRequest
    session: int | None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Gateway -> worker: forget these. Unknown or finished ids are no error."""

    request_ids: tuple[str, ...]
    session: int | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Worker -> gateway: what one step brought for this gateway's requests."""

    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Worker -> gateway: alive, and this is how it stands."""

    status: WorkerStatus
    session: int | None
    """A new number whenever the worker has ended everything that it did for this gateway; None: they have none."""
    num_outputs: int
    """Outputs in this session so far: if the gateway has another number, some were lost."""


ToWorker = Hello | SubmitRequest | AbortRequests
ToGateway = Outputs | Heartbeat

TO_WORKER: Codec[ToWorker] = Codec(Hello, SubmitRequest, AbortRequests)
TO_GATEWAY: Codec[ToGateway] = Codec(Outputs, Heartbeat)
