"""ClusterService: the operators' calls. The fleet's controller carries them out."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from baton.errors import ClusterError, FleetError, InvalidRequest
from baton.fleet import MAX_DRAIN_NODE_S
from baton.messages.control import (
    ControlApi,
    DrainNode,
    DrainWorker,
    FlushCaches,
    SetWorkerRole,
    follow_rollout,
)
from baton.v1 import cluster_service_pb2 as pb
from baton.v1 import cluster_service_pb2_grpc as pb_grpc
from baton.worker import WorkerRole
from gateway.auth import callers
from gateway.grpc import fleet_messages
from gateway.grpc.convert import filled
from gateway.grpc.status import Context
from gateway.model import ServedModel
from gateway.places import Places
from gateway.requests.driver import RequestDriver
from gateway.workers.fleet_view import ask_controller, views_of

WATCH_INTERVAL_S = 1.0
MIN_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S = 0.1, 60.0
MAX_WATCHES = 64
"""At most this many watches at a time. Each message to a watch has some kilobytes."""
MAX_AGE_S = 0.5
"""A description serves all watches until it is this old, or until half the interval of a watch has passed if that is
less. With 64 workers, making a description takes 9 ms of the event loop, besides the controller's part."""

_ROLE_HEARTBEAT_S = 1.0
"""How long SetWorkerRole waits for the worker's heartbeat with the new role, so that a description after the call shows
this role."""

DRAIN_NODE_S = 60.0


class ClusterService(pb_grpc.ClusterServiceServicer):
    """Describes the fleet as gateway and controller see it, and sends operators' commands to the controller.

    The controller carries out a command even if the client that sent it disconnects.
    """

    def __init__(self, driver: RequestDriver, model: ServedModel, control: ControlApi | None) -> None:
        self._driver = driver
        self._model = model
        self._control = control
        self._is_closing = asyncio.Event()
        self._watches = Places(MAX_WATCHES, "calls are watching already")
        self._describing = asyncio.Lock()
        self._described_at = -math.inf
        self._shared = self._shared_without_internals = pb.DescribeClusterResponse()
        """The description that watches of administrators share, and the one that watches of other callers share."""

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> pb.DescribeClusterResponse:
        description = await self._description()
        if not callers.current_caller.get().may_administer:
            fleet_messages.hide_internals(description)
        return description

    async def WatchCluster(
        self, request: pb.WatchClusterRequest, context: Context
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        interval_s = _interval_from(request)
        with self._watches.hold():
            async with aclosing(self._changes(interval_s)) as changes:
                async for description in changes:
                    yield pb.WatchClusterResponse(cluster=description)

    def end_watches(self) -> None:
        """Ends all watches before the server waits for running calls: a watch could last for a long time."""
        self._is_closing.set()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        await self._controller_api().call(DrainWorker(request.worker))
        return pb.DrainWorkerResponse()

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.DrainNodeResponse:
        if not request.node:
            raise InvalidRequest(
                "node", "must not be empty; give the node's address, or its name in DescribeCluster"
            )
        await self._controller_api().call(DrainNode(request.node, _drain_time_from(request)))
        return pb.DrainNodeResponse()

    async def SetWorkerRole(
        self, request: pb.SetWorkerRoleRequest, context: Context
    ) -> pb.SetWorkerRoleResponse:
        role = _role_from(request.role)
        await self._controller_api().call(SetWorkerRole(request.worker, role))
        with suppress(TimeoutError):
            async with asyncio.timeout(_ROLE_HEARTBEAT_S):
                await self._driver.workers.wait_for_role(request.worker, role)
        return pb.SetWorkerRoleResponse()

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        command = FlushCaches(tuple(request.workers), request.force)
        flushes = (await self._controller_api().call(command)).workers
        return pb.FlushCacheResponse(workers=[filled(pb.CacheFlush, flush) for flush in flushes])

    async def RolloutFleet(
        self, request: pb.RolloutFleetRequest, context: Context
    ) -> AsyncIterator[pb.RolloutFleetResponse]:
        async for step in follow_rollout(self._controller_api(), tuple(request.workers)):
            yield filled(pb.RolloutFleetResponse, step)

    async def _changes(self, interval_s: float) -> AsyncGenerator[pb.DescribeClusterResponse, None]:
        latest: pb.DescribeClusterResponse | None = None
        now = asyncio.get_running_loop().time
        ends_at = now() + callers.MAX_WATCH_S
        while not self._is_closing.is_set():
            current = await self._recent_description(min(interval_s / 2, MAX_AGE_S))
            if current is not latest and current != latest:
                yield current
                latest = current
            if now() >= ends_at:
                raise ClusterError(f"a watch lasts at most {callers.MAX_WATCH_S:g} s; start another one")
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._is_closing.wait()
        raise ClusterError("this gateway is shutting down; use another one")

    async def _recent_description(self, age_s: float) -> pb.DescribeClusterResponse:
        """A description that watches share, at most `age_s` old when this call began. The caller must not change it.

        A new description serves all calls that waited for it, however long the controller took.
        """
        now = asyncio.get_running_loop().time
        asked_at = now()
        async with self._describing:
            if asked_at - self._described_at > age_s:
                began_at = now()
                self._shared, hidden = await self._description(), pb.DescribeClusterResponse()
                hidden.CopyFrom(self._shared)
                fleet_messages.hide_internals(hidden)
                self._shared_without_internals, self._described_at = hidden, began_at
            may_administer = callers.current_caller.get().may_administer
            return self._shared if may_administer else self._shared_without_internals

    async def _description(self) -> pb.DescribeClusterResponse:
        controller = await ask_controller(self._control)
        driver = self._driver
        return pb.DescribeClusterResponse(
            model=self._model.name,
            model_path=self._model.path,
            dtype=self._model.dtype,
            kv_cache_dtype=self._model.kv_cache_dtype,
            workers=map(
                fleet_messages.worker_to_message, views_of(driver.workers.clients, controller.replicas)
            ),
            gateway=fleet_messages.gateway_to_message(driver.dispatcher),
            nodes=map(fleet_messages.node_to_message, controller.nodes),
            controller=fleet_messages.controller_to_message(controller),
        )

    def _controller_api(self) -> ControlApi:
        if self._control is None:
            raise FleetError("this gateway has no controller; start and stop its workers one by one")
        return self._control


def _role_from(text: str) -> WorkerRole:
    try:
        return WorkerRole(text)
    except ValueError:
        roles = " or ".join(role.value for role in WorkerRole)
        raise InvalidRequest("role", f"got {text!r}; must be {roles}") from None


def _drain_time_from(request: pb.DrainNodeRequest) -> float:
    timeout_s = request.timeout_s if request.HasField("timeout_s") else DRAIN_NODE_S
    if not 0.0 < timeout_s <= MAX_DRAIN_NODE_S:
        raise InvalidRequest(
            "timeout_s", f"got {timeout_s:g}; must be more than 0 and at most {MAX_DRAIN_NODE_S:g}"
        )
    return timeout_s


def _interval_from(request: pb.WatchClusterRequest) -> float:
    interval_s = request.interval_s if request.HasField("interval_s") else WATCH_INTERVAL_S
    if not MIN_WATCH_INTERVAL_S <= interval_s <= MAX_WATCH_INTERVAL_S:
        allowed = f"from {MIN_WATCH_INTERVAL_S:g} to {MAX_WATCH_INTERVAL_S:g}"
        raise InvalidRequest("interval_s", f"got {interval_s:g}; {allowed}")
    return interval_s
