"""What the dispatcher is told, and what it wants done: its events and its effects.

There is an object of these for every message or token, so they are not frozen in earnest: making a frozen one takes
several times as long. All are treated as frozen.
"""

from dataclasses import dataclass

from baton.request import EngineRequest, RequestOutput
from baton.worker import WorkerStatus
from gateway.requests.record import RequestRecord
from gateway.requests.request import Delta, GatewayRequest
from gateway.routing.placement import Placement

# events


@dataclass(slots=True)
class Submitted:
    """A client asks. Exactly one StreamEnded follows, some time."""

    request: GatewayRequest


@dataclass(slots=True)
class AbortRequested:
    """A request must not run any more. Its client has been told."""

    request: GatewayRequest


@dataclass(slots=True)
class StreamEnded:
    """A client's stream is over: it has its whole answer, or an error ended the stream. Its client may have left."""

    request: GatewayRequest
    error: BaseException | None


@dataclass(slots=True)
class WorkerReported:
    """A heartbeat. The worker may have room, or may have become another one."""

    status: WorkerStatus


@dataclass(slots=True)
class WorkerOutputs:
    """What one message of a worker brings, of any number of requests."""

    worker: str
    outputs: tuple[RequestOutput, ...]


@dataclass(slots=True)
class WorkerLost:
    """Nothing that the worker had will be answered. It may be heard of again."""

    worker: str
    reason: str


@dataclass(slots=True)
class Tick:
    """`next_deadline` has come."""


Event = Submitted | AbortRequested | StreamEnded | WorkerReported | WorkerOutputs | WorkerLost | Tick

# effects


@dataclass(slots=True)
class Deliver:
    """The client gets this. The request is over if it has a finish."""

    request: GatewayRequest
    delta: Delta


@dataclass(slots=True)
class Refuse:
    """The client gets this error, behind what it has yet to read: the request is over."""

    request: GatewayRequest
    error: Exception


@dataclass(slots=True)
class Placed:
    """An attempt begins; only for requests that want to know, by `on_placed`."""

    request: GatewayRequest
    placement: Placement


@dataclass(slots=True)
class SubmitTo:
    """A worker gets a sub-request of a request."""

    worker: str
    sub_request: EngineRequest


@dataclass(slots=True)
class AbortAt:
    """A worker must end a sub-request, if it has it."""

    worker: str
    engine_request_id: str


@dataclass(slots=True)
class Record:
    """Observers get this: the request's stream is over, and nothing is kept of the request."""

    record: RequestRecord


Effect = Deliver | Refuse | Placed | SubmitTo | AbortAt | Record
