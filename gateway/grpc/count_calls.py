"""CountCalls: reports the status of every gRPC call, together with its method."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

OnCallEnded = Callable[[str, str], None]
"""Called with the names of the method and of the status code."""

Context = grpc.aio.ServicerContext[Any, Any]


OTHER = "(other)"
"""Replaces the names of unknown methods, since clients could send any number of different names."""


class CountCalls(grpc.aio.ServerInterceptor):
    """The outermost interceptor.

    So it also counts unknown methods, and calls that another interceptor refuses.
    """

    def __init__(self, services: Iterable[str], on_call_ended: OnCallEnded) -> None:
        """`services` are full names of services that protobuf's default pool knows."""
        described = map(descriptor_pool.Default().FindServiceByName, services)
        self._methods = {
            f"/{service.full_name}/{name}" for service in described for name in service.methods_by_name
        }
        self._on_call_ended = on_call_ended

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details) or _UNKNOWN
        method = handler_call_details.method if handler_call_details.method in self._methods else OTHER
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            if (behaviour := getattr(handler, kind)) is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                counted = self._counted(method, behaviour)
                return make(counted, handler.request_deserializer, handler.response_serializer)
        return handler

    def _counted(
        self, method: str, behaviour: Callable[[Any, Context], Any]
    ) -> Callable[[Any, Context], Any]:
        if not inspect.isasyncgenfunction(behaviour):

            async def call(request: Any, context: Context) -> Any:
                watch = self._watch(method, context)
                try:
                    return await behaviour(request, context)
                except Exception:
                    watch.has_raised = True
                    raise

            return call

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            watch = self._watch(method, context)
            try:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception:
                watch.has_raised = True
                raise

        return stream

    def _watch(
        self, method: str, context: Any
    ) -> "_Watch":  # Any: grpc's type stub rejects functions as callbacks
        watch = _Watch()
        context.add_done_callback(lambda ended: self._on_call_ended(method, watch.code(ended)))
        return watch


async def _refuse(_messages: Any, context: Context) -> None:
    """Refuses unknown methods with gRPC's own status.

    Because this function does it, the calls are counted.
    """
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


_UNKNOWN: Any = grpc.stream_stream_rpc_method_handler(_refuse)


class _Watch:
    """Records whether a call raised an exception, which its context does not know."""

    def __init__(self) -> None:
        self.has_raised = False

    def code(self, context: Any) -> str:  # Any: gRPC's stub excludes calls without a code or a deadline
        """The name of an ended call's status code."""
        if (code := context.code()) is not None:
            return str(code.name)
        if self.has_raised:
            return grpc.StatusCode.UNKNOWN.name
        if context.done():
            return grpc.StatusCode.OK.name
        left_s = context.time_remaining()
        is_late = left_s is not None and left_s <= 0.0
        return (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name
