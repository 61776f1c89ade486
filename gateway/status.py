"""Our errors as gRPC statuses, in one place."""

from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.errors import (
    BatonError,
    ClusterError,
    DeadlinePassed,
    FleetError,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    WorkerUnavailable,
)

CODES: dict[type[BatonError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    WorkerUnavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestAborted: grpc.StatusCode.ABORTED,
    FleetError: grpc.StatusCode.FAILED_PRECONDITION,
    ClusterError: grpc.StatusCode.UNAVAILABLE,
}


async def abort_call(context: "grpc.aio.ServicerContext[Any, Any]", error: BatonError) -> NoReturn:
    """Ends the call with the error's status. Overloaded says in the trailer `retry-after-ms` when to come back."""
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        trailers = (("retry-after-ms", str(int(error.retry_after_s * 1000))),)
    await context.abort(CODES.get(type(error), grpc.StatusCode.INTERNAL), str(error), trailers)
