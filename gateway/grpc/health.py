"""Health: grpc.health.v1. Probes and load balancers ask this service whether the gateway serves.

In gRPC's own implementation, watchers wait for each other's writes, and a change of status waits for all of
them. One client that does not read would block all other watchers, and the gateway's shutdown.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2 as pb

from baton.errors import ClusterError
from gateway.grpc.status import Context
from gateway.places import Places

MAX_WATCHES = 4096
"""At most this many watches at a time. These calls need no key, and each lasts until its client ends it."""

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Health"].full_name


class Health:
    """Every service has the status of the gateway: SERVING until the gateway stops.

    The empty name means the gateway.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._is_stopping = asyncio.Event()
        self._watches = Places(MAX_WATCHES, "calls are watching already")

    def report_not_serving(self) -> None:
        """Reports NOT_SERVING from now on, and ends all watches.

        A watcher receives the new status before its call ends. Otherwise watches could last for ever.
        """
        self._is_stopping.set()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:
        statuses = {
            name: pb.HealthCheckResponse(status=self._status(name)) for name in sorted(self._services)
        }
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        with self._watches.hold():
            status = self._status(request.service)
            yield pb.HealthCheckResponse(status=status)
            await self._is_stopping.wait()
            if (latest := self._status(request.service)) != status:
                yield pb.HealthCheckResponse(status=latest)
        raise ClusterError("this gateway is shutting down; use another one")

    def _status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return (
            pb.HealthCheckResponse.NOT_SERVING
            if self._is_stopping.is_set()
            else pb.HealthCheckResponse.SERVING
        )
