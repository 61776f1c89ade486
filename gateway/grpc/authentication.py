"""Which caller may call which gRPC method."""

from collections.abc import Iterable

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
"""The right that a method needs, or that all other methods of a service need. None: any key is enough. If neither a
method nor its service is listed, the method needs the right to generate."""


def right_for(method: str) -> Right | None:
    """The right that `/package.Service/Method` needs; None if any key is enough, or the service is open."""
    return RIGHTS.get(method, RIGHTS.get(f"/{_service_of(method)}", Right.GENERATE))


def _service_of(method: str) -> str:
    """The service part of a method's name. The name may be malformed, since a client may send any name."""
    return method.rpartition("/")[0].removeprefix("/")


async def admit(
    authenticator: Authenticator, method: str, metadata: Iterable[tuple[str, str | bytes]]
) -> None:
    """Sets `current_caller` for the call. Raises a RequestError that says what is missing."""
    if _service_of(method) in OPEN:
        current_caller.set(NO_CALLER)
        return
    authorizations = [str(value) for name, value in metadata if name == "authorization"]
    caller = await authenticator.caller_of(authorizations)
    current_caller.set(caller)
    authenticator.admit(caller, right_for(method))
