"""Guard: gives every gRPC call an id, a caller and a status, counts it, and limits the time of reads and writes."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from baton.errors import DeadlinePassed, InvalidRequest, SlowReader
from gateway.auth.authenticator import Authenticator
from gateway.auth.callers import current_caller
from gateway.call_ids import TraceContext, is_well_formed, offered_id, request_id_for, trace_context_from
from gateway.error_codes import codes_of, name_of
from gateway.grpc.authentication import admit
from gateway.grpc.field_count import check_num_fields
from gateway.grpc.status import NO_SUCH_METHOD, REQUEST_ID, Context, abort_call
from gateway.telemetry.call_log import INTERNAL_ERROR, CallError, OnCallError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 60.0
"""Limit for the arrival of a call's message. Over HTTP, the same limit applies to a body."""

ABORT_TIMEOUT_S = 1.0
"""Limit for sending a status. gRPC sends a status after all data that the client has not read yet. After this
time, gRPC keeps the status for a client that reads later."""

MAX_COMPRESSED_BYTES = 256 * 1024
"""Largest response that is compressed. gRPC compresses in the event loop: 1 MiB takes 30 ms."""

ENCODING = "baton-response-encoding"
"""The header with which a client requests compressed answers. gRPC does not show which encodings a client understands.
It breaks the call of a client that does not understand the answer's encoding."""

OTHER = "(other)"
"""Replaces the names of unknown methods in counts and logs. Clients could send any number of names, even with line
ends."""

OnCallEnded = Callable[[str, str], None]
"""Called with the names of the method and of the status code."""

RpcMethod = Callable[[Any, Context], Any]
Read = Callable[[bytes], Awaitable[Any]]

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Guard(grpc.aio.ServerInterceptor):
    """Turns Baton's own errors into gRPC statuses, and bounds how long a call reads and writes.

    All other errors are logged, and the client only learns that an error occurred.

    A message with an empty `request_id` gets an id, so that service, log and status use the same id. If the
    client or a proxy sent another id in metadata, the trailer returns the id of the metadata. Answers are
    compressed on request.

    Every call is counted with its status, even a call of an unknown method, and a call whose caller is refused. A
    caller is refused before the first message is read.

    A call ends if its client reads nothing for `write_timeout_s`, or if its message does not arrive. If the client does
    not even read the first message, the call's work ends, but its status waits until that message is read. Once the
    gateway is closing, a call also ends if the gateway waits for another message of the client.
    """

    def __init__(
        self,
        services: Iterable[str],
        authenticator: Authenticator,
        write_timeout_s: float,
        is_closing: asyncio.Event,
        on_error: OnCallError,
        on_ended: OnCallEnded,
    ) -> None:
        """`services`: full names of services that protobuf's default pool knows."""
        described = map(descriptor_pool.Default().FindServiceByName, services)
        self._request_kinds: dict[str, Descriptor] = {
            f"/{each.full_name}/{name}": method.input_type
            for each in described
            for name, method in each.methods_by_name.items()
        }
        self._authenticator = authenticator
        self._on_ended = on_ended
        self._write_timeout_s = write_timeout_s
        self._is_closing = is_closing
        self._on_error = on_error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        handler: Any = await continuation(handler_call_details) or _UNKNOWN
        # gRPC itself waits without limit for the one message of a call, and never ends a call that sends no message. So
        # every call is served as a stream, from which the guard reads. A single answer is also written as a stream (of
        # one message), since only streams are compressed.
        call = self._guarded(handler, handler_call_details.method)
        serialize = partial(_serialized, handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(call, None, serialize)

    def _guarded(self, handler: Any, name: str) -> RpcMethod:
        method = handler.stream_stream or handler.unary_stream or handler.unary_unary
        takes_stream = handler.stream_stream is not None  # gRPC's reflection, and unknown methods
        kind, is_generator = self._request_kinds.get(name), inspect.isasyncgenfunction(method)
        read = partial(_read, handler.request_deserializer, kind)
        shown = OTHER if kind is None else name

        # The context is an Any because gRPC's stub rejects functions as callbacks.
        async def call(_messages: Any, context: Any) -> None:
            context.add_done_callback(lambda ended: self._on_ended(shown, _code_of(ended)))
            responses = _Responses(context, self._write_timeout_s)
            offered = offered_id(_metadata(context, REQUEST_ID))
            request_id = request_id_for(offered)
            try:
                await admit(self._authenticator, name, context.invocation_metadata() or ())
                request = self._messages(read, context) if takes_stream else await _receive_one(read, context)
                request_id = _identified(request, request_id)
                context.set_trailing_metadata(((REQUEST_ID, offered or request_id),))
                if method is not _refuse:
                    _set_compression(context)
                if is_generator:
                    async with aclosing(method(request, context)) as stream:
                        async for response in stream:
                            await responses.write(response)
                else:
                    await responses.write(await method(request, context))
            except Exception as error:
                if not _is_over(context, error):
                    self._on_error(_call_error(error, shown, request_id))
                await responses.wait_for_headers()
                await _end(context, error, shown, request_id, offered)

        return call

    async def _messages(self, read: Read, context: Context) -> AsyncIterator[Any]:
        """Yields messages until the client sends no more or is silent too long, or the gateway is closing."""
        closing = asyncio.ensure_future(self._is_closing.wait())
        reading: asyncio.Future[Any] = closing
        try:
            while not closing.done():
                reading = asyncio.ensure_future(context.read())
                both = (reading, closing)
                await asyncio.wait(both, timeout=REQUEST_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done() or reading.result() is grpc.aio.EOF:
                    return
                yield await read(reading.result())
        finally:
            closing.cancel()
            reading.cancel()


class _Responses:
    """Writes the messages of one call. A message that the client does not read in time ends the call."""

    def __init__(self, context: Context, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._first: asyncio.Future[None] | None = None

    async def write(self, response: Any) -> None:
        """Writes a message. Raises SlowReader if the client does not read the message in time."""
        if isinstance(response, bytes) and len(response) > MAX_COMPRESSED_BYTES:
            self._context.disable_next_message_compression()
        writing: Awaitable[None] = self._context.write(response)
        if self._first is None:
            self._first = asyncio.ensure_future(writing)
            # Retrieves the error of a write that fails after its waiter has given up.
            self._first.add_done_callback(lambda first: first.cancelled() or first.exception())
            writing = asyncio.shield(self._first)
        try:
            async with asyncio.timeout(self._timeout_s):
                await writing
        except TimeoutError:
            raise SlowReader(
                f"the client has not read anything for {self._timeout_s:g} s, although data was waiting"
            ) from None

    async def wait_for_headers(self) -> None:
        """Waits for the end of the first write, which sends the headers: until then, gRPC refuses to send a status, and
        the client would wait for ever."""
        if self._first is not None:
            await asyncio.wait([self._first])


def trace_of(context: Context) -> TraceContext | None:
    """The trace context that the client sent; None if the client sent none."""
    sent = context.invocation_metadata() or ()
    parents, states = (
        [value for key, value in sent if key == name and isinstance(value, str)]
        for name in ("traceparent", "tracestate")
    )
    return trace_context_from(parents, states)


async def _refuse(_messages: Any, context: Context) -> None:
    """Refuses an unknown method with gRPC's own status."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, NO_SUCH_METHOD)


_UNKNOWN: Any = grpc.stream_stream_rpc_method_handler(_refuse)


def deadline_of(context: Context) -> float | None:
    """When the client stops waiting, on the event loop's clock; None: it waits without limit."""
    time_left_s = context.time_remaining()
    return None if time_left_s is None else asyncio.get_running_loop().time() + time_left_s


def _code_of(context: Any) -> str:  # Any: gRPC's stub excludes calls without a code or a deadline
    """The name of an ended call's status code."""
    if (code := context.code()) is not None:
        return str(code.name)
    if context.done():
        return grpc.StatusCode.OK.name
    remaining_s = context.time_remaining()
    is_late = remaining_s is not None and remaining_s <= 0.0
    return (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name


def _metadata(context: Context, key: str) -> str | None:
    value = dict(context.invocation_metadata() or ()).get(key)
    return value if isinstance(value, str) else None


async def _receive_one(read: Read, context: Context) -> Any:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            body = await context.read()
    except TimeoutError:
        raise DeadlinePassed(f"the call's message did not arrive within {REQUEST_TIMEOUT_S:g} s") from None
    if body is grpc.aio.EOF:
        raise InvalidRequest("request", "the call ended without a message")
    return await read(body)


async def _read(parse: Callable[[bytes], Any], kind: Descriptor | None, body: bytes) -> Any:
    try:
        if kind is not None:
            await check_num_fields(body, kind)
        return parse(body)
    except DecodeError:
        raise InvalidRequest("request", "the bytes are not a valid message for this call") from None


def _serialized(serialize: Callable[[Any], bytes], response: Any) -> bytes:
    """Serializes a response, unless its method has serialized it already (as for large responses)."""
    return response if isinstance(response, bytes) else serialize(response)


def _identified(request: Any, drawn: str) -> str:
    """The id for logs and statuses: the message's id if it is well-formed, else `drawn`. Writes `drawn` into a message
    without an id. Leaves an ill-formed id in the message, so that it is refused."""
    if not isinstance(request, Message) or "request_id" not in request.DESCRIPTOR.fields_by_name:
        return drawn
    message: Any = request
    if not message.request_id:
        message.request_id = drawn
    return message.request_id if is_well_formed(message.request_id) else drawn


def _set_compression(context: Context) -> None:
    asked = dict(context.invocation_metadata() or ()).get(ENCODING, "identity")
    if asked not in ("gzip", "identity"):
        raise InvalidRequest(ENCODING, f"unsupported compression {asked!r}; use gzip or identity")
    if asked == "gzip":
        context.set_compression(grpc.Compression.Gzip)


def _is_over(context: Context, error: Exception) -> bool:
    """Whether the call already has a status, or its client has ended it. gRPC may notice the latter only when it fails
    to send."""
    return isinstance(error, grpc.aio.AbortError | grpc.aio.InternalError) or context.cancelled()


def _call_error(error: Exception, name: str, request_id: str) -> CallError:
    caller = current_caller.get(None)
    return CallError(
        api="grpc",
        error=INTERNAL_ERROR if codes_of(error).is_internal else name_of(error),
        caller=None if caller is None else caller.name,
        call=name,
        request_id=request_id,
    )


async def _end(
    context: Context, error: Exception, name: str, request_id: str, offered: str | None
) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if codes_of(error).is_internal and not isinstance(error, grpc.aio.BaseError):
        extra = {"request_id": request_id}
        logger.error("%s failed, request %s", name, request_id, exc_info=error, extra=extra)
    if _is_over(context, error):
        # gRPC would log any other error, with the method's name as the client sent it.
        raise asyncio.CancelledError from None
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await abort_call(context, error, request_id, offered)
    except (TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
