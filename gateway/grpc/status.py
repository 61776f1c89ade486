"""Converts our errors to gRPC statuses with the details of google.rpc."""

import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details_pb
from google.rpc import status_pb2

from baton.errors import InvalidRequest, Overloaded
from gateway.error_codes import INTERNAL_MESSAGE, codes_of, name_of

DOMAIN = "baton"
"""The domain of the reasons in `google.rpc.ErrorInfo`."""

DETAILS = "grpc-status-details-bin"
RETRY_TRAILERS = ("retry-after-ms", "grpc-retry-pushback-ms")
"""Trailers with retry hints. The first is for people. gRPC's own clients obey the second if their service
config allows retries."""

MAX_MESSAGE_BYTES = 1_000
"""Limit for the text of a status. Up to three copies share one block of headers, and clients accept only 8
KiB of headers."""

REQUEST_ID = "x-request-id"
"""The metadata key for the id of a request. HTTP uses a header of the same name."""

NO_SUCH_METHOD = "Method not found!"
"""gRPC's own message about a method that a server does not have."""

Context = grpc.aio.ServicerContext[Any, Any]


async def abort_call(context: Context, error: Exception, request_id: str, offered: str | None) -> NoReturn:
    """Ends the call with the error's status; the text of an internal error is not sent.

    `request_id` is well-formed. `offered`: the id that the client sent in metadata, if any. The trailer then returns
    this id.
    """
    code = codes_of(error).grpc
    message = _short(INTERNAL_MESSAGE if code is grpc.StatusCode.INTERNAL else str(error))
    details = map(_packed, _details(error, code, message, request_id))
    status = status_pb2.Status(code=code.value[0], message=message, details=details)
    trailers: list[tuple[str, str | bytes]] = [
        (DETAILS, status.SerializeToString()),
        (REQUEST_ID, offered or request_id),
    ]
    if (retry_ms := _retry_ms(error)) is not None:
        trailers += [(trailer, str(retry_ms)) for trailer in RETRY_TRAILERS]
    await context.abort(code, message, tuple(trailers))


def reason_of(error: Exception, code: grpc.StatusCode) -> str:
    """The error's name in capitals, as ErrorInfo requires: INVALID_REQUEST."""
    if code is grpc.StatusCode.INTERNAL:
        return "INTERNAL"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name_of(error)).upper()


def _details(error: Exception, code: grpc.StatusCode, message: str, request_id: str) -> Iterator[Message]:
    yield details_pb.ErrorInfo(reason=reason_of(error, code), domain=DOMAIN)
    yield details_pb.RequestInfo(request_id=request_id)
    if isinstance(error, InvalidRequest):
        violation = details_pb.BadRequest.FieldViolation(field=_short(error.field), description=message)
        yield details_pb.BadRequest(field_violations=[violation])
    if (retry_ms := _retry_ms(error)) is not None:
        delay = Duration()
        delay.FromMilliseconds(retry_ms)
        yield details_pb.RetryInfo(retry_delay=delay)


def _retry_ms(error: Exception) -> int | None:
    return math.ceil(error.retry_after_s * 1000) if isinstance(error, Overloaded) else None


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _short(text: str) -> str:
    """Shortens the text: it may contain client input, which must not be returned in full."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return text
    return encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
