"""GrpcAuthentication: decides which caller may call which gRPC method, before the first message is read."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from baton.errors import RequestError
from gateway.auth.authenticator import Authenticator
from gateway.auth.callers import NO_CALLER, Right, current_caller

OPEN = frozenset({"grpc.health.v1.Health"})
"""Services that every client may use without a key."""

RIGHTS: dict[str, Right | None] = {
    "/baton.v1.ClusterService/DescribeCluster": Right.OBSERVE,
    "/baton.v1.ClusterService/WatchCluster": Right.OBSERVE,
    "/baton.v1.ClusterService": Right.ADMINISTER,
    "/baton.v1.GenerationService/Abort": None,
    "/baton.v1.GenerationService/GetModelInfo": None,
    "/vllm.grpc.engine.VllmEngine/HealthCheck": None,
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": None,
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": None,
    "/vllm.grpc.engine.VllmEngine/GetLoads": None,
    "/vllm.grpc.engine.VllmEngine/Abort": None,
    "/grpc.reflection.v1alpha.ServerReflection": None,
    "/grpc.reflection.v1.ServerReflection": None,
}
"""The right that a method needs, or else the right that its service needs. None: any key is enough. Methods
that are not listed need the right to generate."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
"""The handler of a method; None if the method does not exist."""


def right_for(method: str) -> Right | None:
    """The right that `/package.Service/Method` needs; None if any key is enough, or the service is open."""
    return RIGHTS.get(method, RIGHTS.get(f"/{_service_of(method)}", Right.GENERATE))


def _service_of(method: str) -> str:
    """The service part of a method's name. The name may be malformed, since a client may send any name."""
    return method.rpartition("/")[0].removeprefix("/")


class GrpcAuthentication(grpc.aio.ServerInterceptor):
    """Sets `current_caller` for the call, or refuses the call with a status that says what is missing."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if _service_of(method) in OPEN:
            current_caller.set(NO_CALLER)
            return handler
        metadata = handler_call_details.invocation_metadata
        shown = [str(value) for name, value in metadata if name == "authorization"]
        try:
            caller = self._authenticator.caller_of(shown)
            current_caller.set(caller)
            self._authenticator.admit(caller, right_for(method))
        except RequestError as error:
            return _refusing(error)
        return handler


def _refusing(error: RequestError) -> Handler:
    """Refuses the call.

    The handler has streams in both directions, so that no message is read before the refusal.
    """

    async def refuse(_requests: Any, _context: object) -> None:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
