"""The dispatcher's events (what happened) and effects (what to do about it).

Treat events and effects as frozen. They are not declared frozen, since creating a frozen dataclass takes
several times as long, and every message and token creates one.
"""

from dataclasses import dataclass

from baton.request import EngineRequest, RequestOutput
from baton.worker import WorkerStatus
from gateway.requests.record import RequestRecord
from gateway.requests.request import Delta, GatewayRequest
from gateway.routing.placement import Placement
from gateway.workers.worker_listener import LossCause

# events


@dataclass(slots=True)
class Submitted:
    """A client sent a request. Exactly one StreamEnded follows."""

    request: GatewayRequest


@dataclass(slots=True)
class AbortRequested:
    """A request must end. Its client has already been notified."""

    request: GatewayRequest


@dataclass(slots=True)
class StreamEnded:
    """A client's stream is over: the answer is complete, or `error` ended the stream. A client that left counts as
    an error."""

    request: GatewayRequest
    error: BaseException | None


@dataclass(slots=True)
class WorkerReported:
    """A heartbeat arrived. The worker may have room again, or may be a new incarnation."""

    status: WorkerStatus


@dataclass(slots=True)
class WorkerOutputs:
    """The outputs in one message of a worker, for any number of requests."""

    worker: str
    outputs: tuple[RequestOutput, ...]


@dataclass(slots=True)
class WorkerLost:
    """The requests on this worker will not be answered. The worker may become reachable again."""

    worker: str
    cause: LossCause
    reason: str


@dataclass(slots=True)
class Tick:
    """`next_deadline` has passed."""


Event = Submitted | AbortRequested | StreamEnded | WorkerReported | WorkerOutputs | WorkerLost | Tick

# effects


@dataclass(slots=True)
class Deliver:
    """Send this delta to the client. If the delta has a finish, the request is over."""

    request: GatewayRequest
    delta: Delta


@dataclass(slots=True)
class Refuse:
    """The request is over. Send this error to the client, after the part of the answer that the client has not read
    yet."""

    request: GatewayRequest
    error: Exception


@dataclass(slots=True)
class Placed:
    """Report the placement of an attempt that begins; only for requests with `on_placed`."""

    request: GatewayRequest
    placement: Placement


@dataclass(slots=True)
class SubmitTo:
    """Send a sub-request to a worker."""

    worker: str
    sub_request: EngineRequest


@dataclass(slots=True)
class AbortAt:
    """Tell a worker to end a sub-request, if the worker has it."""

    worker: str
    engine_request_id: str


@dataclass(slots=True)
class Record:
    """Report a request whose stream is over. The dispatcher has forgotten the request."""

    record: RequestRecord


Effect = Deliver | Refuse | Placed | SubmitTo | AbortAt | Record
