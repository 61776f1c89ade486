"""How each of Baton's errors appears to a client: one table of gRPC status, HTTP status and OpenAI's code."""

from dataclasses import dataclass
from http import HTTPStatus

from grpc import StatusCode

from baton.errors import (
    ClusterError,
    DeadlinePassed,
    DeadlineTooClose,
    FleetError,
    GatewayStopping,
    HarmfulRequest,
    InvalidRequest,
    KeysUnavailable,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    RateLimited,
    RequestAborted,
    SlowReader,
    StoreUnavailable,
    Unauthenticated,
    UnknownModel,
    UnknownPreviousResponse,
    UnknownResponse,
    UnknownWorker,
    Unsupported,
    WorkerUnavailable,
)

INTERNAL_MESSAGE = "internal error; see the gateway's log"
"""The only message that a client gets for an error without a row in the table."""


@dataclass(frozen=True, slots=True)
class ErrorCodes:
    """The codes of one error in each protocol."""

    grpc: StatusCode
    http: HTTPStatus
    openai: str | None = None
    """OpenAI's `code`, if programs check it or several errors share a status. None: the code for the HTTP status
    (`OPENAI_CODES` in gateway/http/error_shapes.py, otherwise the status's name)."""

    @property
    def is_internal(self) -> bool:
        return self.grpc is StatusCode.INTERNAL


_INTERNAL = ErrorCodes(StatusCode.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR)

_CODES: dict[type[BaseException], ErrorCodes] = {
    ClusterError: ErrorCodes(StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    FleetError: ErrorCodes(StatusCode.FAILED_PRECONDITION, HTTPStatus.CONFLICT),
    UnknownWorker: ErrorCodes(StatusCode.NOT_FOUND, HTTPStatus.NOT_FOUND),
    InvalidRequest: ErrorCodes(StatusCode.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
    UnknownModel: ErrorCodes(StatusCode.NOT_FOUND, HTTPStatus.NOT_FOUND, "model_not_found"),
    PromptTooLong: ErrorCodes(StatusCode.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST, "context_length_exceeded"),
    UnknownResponse: ErrorCodes(StatusCode.NOT_FOUND, HTTPStatus.NOT_FOUND),
    UnknownPreviousResponse: ErrorCodes(
        StatusCode.NOT_FOUND, HTTPStatus.BAD_REQUEST, "previous_response_not_found"
    ),
    StoreUnavailable: ErrorCodes(StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    # Not 503 or 429: SDKs retry these automatically, and this request must not be sent again.
    HarmfulRequest: ErrorCodes(StatusCode.FAILED_PRECONDITION, HTTPStatus.BAD_REQUEST, "harmful_request"),
    Unauthenticated: ErrorCodes(StatusCode.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED, "invalid_api_key"),
    KeysUnavailable: ErrorCodes(StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    PermissionDenied: ErrorCodes(StatusCode.PERMISSION_DENIED, HTTPStatus.FORBIDDEN),
    Unsupported: ErrorCodes(StatusCode.UNIMPLEMENTED, HTTPStatus.NOT_IMPLEMENTED),
    Overloaded: ErrorCodes(StatusCode.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS),
    RateLimited: ErrorCodes(
        StatusCode.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded"
    ),
    DeadlineTooClose: ErrorCodes(
        StatusCode.DEADLINE_EXCEEDED, HTTPStatus.GATEWAY_TIMEOUT, "deadline_too_close"
    ),
    WorkerUnavailable: ErrorCodes(StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    GatewayStopping: ErrorCodes(StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    RequestAborted: ErrorCodes(StatusCode.ABORTED, HTTPStatus.GONE, "request_aborted"),
    DeadlinePassed: ErrorCodes(StatusCode.DEADLINE_EXCEEDED, HTTPStatus.GATEWAY_TIMEOUT),
    SlowReader: ErrorCodes(StatusCode.ABORTED, HTTPStatus.GONE, "slow_reader"),
}


def codes_of(error: BaseException) -> ErrorCodes:
    """The row of the error's class or of its nearest base class that has a row, else INTERNAL."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), _INTERNAL)


def name_of(error: BaseException) -> str:
    """The name that clients and metrics see: that of the class whose row `codes_of` returns, else of the error's own
    class."""
    return next((kind for kind in type(error).__mro__ if kind in _CODES), type(error)).__name__
