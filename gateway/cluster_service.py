"""ClusterService: the operators' calls. What they order is for the controller to do; here it is asked and answered."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.errors import BatonError, ClusterError, FleetError, InvalidRequest
from baton.fleet import FleetDescription
from baton.v1 import cluster_service_pb2 as pb
from baton.v1 import cluster_service_pb2_grpc as pb_grpc
from baton.worker import WorkerRole
from gateway import fleet_messages
from gateway.dispatcher import Dispatcher
from gateway.fleet_control import FleetControl
from gateway.generation_service import ServedModel
from gateway.status import abort_call

DESCRIBE_TIMEOUT_S = 1.0
"""A controller that takes longer is away, and what the gateway itself knows is the answer."""

Context = grpc.aio.ServicerContext[Any, Any]


class ClusterService(pb_grpc.ClusterServiceServicer):
    """Tells what the gateway and the controller know of the fleet, and passes orders on to the latter.

    An order that was passed on is the controller's: a caller who leaves does not call it back.
    """

    def __init__(
        self, dispatcher: Dispatcher, model: ServedModel, fleet_control: FleetControl | None
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._fleet_control = fleet_control

    async def DescribeCluster(  # noqa: N802
        self,
        request: pb.DescribeClusterRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> pb.DescribeClusterResponse:
        controller, fleet = await self._controller()
        clients = self._dispatcher.fleet.clients
        return pb.DescribeClusterResponse(
            model=self._model.name,
            model_path=self._model.path,
            workers=fleet_messages.workers_to_messages(clients, fleet.slots if fleet else ()),
            gateway=fleet_messages.gateway_to_message(
                self._dispatcher.num_in_flight, self._dispatcher.num_queued, self._dispatcher.tally
            ),
            nodes=map(fleet_messages.node_to_message, fleet.nodes if fleet else ()),
            controller=controller,
        )

    async def DrainWorker(  # noqa: N802
        self, request: pb.DrainWorkerRequest, context: Context
    ) -> pb.DrainWorkerResponse:
        try:
            await self._control().drain(request.worker)
        except (FleetError, ClusterError) as error:
            await self._refuse([request.worker], error, context)
        return pb.DrainWorkerResponse()

    async def SetWorkerRole(  # noqa: N802
        self, request: pb.SetWorkerRoleRequest, context: Context
    ) -> pb.SetWorkerRoleResponse:
        try:
            role = _role_from(request.role)
            await self._control().set_role(request.worker, role)
        except (FleetError, ClusterError, InvalidRequest) as error:
            await self._refuse([request.worker], error, context)
        return pb.SetWorkerRoleResponse()

    async def RolloutFleet(  # noqa: N802
        self,
        request: pb.RolloutFleetRequest,
        context: Context,
    ) -> AsyncIterator[pb.RolloutFleetResponse]:
        asked = tuple(request.workers)
        try:
            async for step in self._control().rollout(asked):
                asked = ()  # they were all there when it began
                yield fleet_messages.step_to_message(step)
        except (FleetError, ClusterError) as error:
            await self._refuse(asked, error, context)

    async def _controller(self) -> tuple[pb.Controller, FleetDescription | None]:
        if self._fleet_control is None:
            return pb.Controller(state="none"), None
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                fleet = await self._fleet_control.describe()
        except TimeoutError:
            reason = f"it did not answer within {DESCRIBE_TIMEOUT_S:g} s"
            return pb.Controller(state="away", failure=reason), None
        except (FleetError, ClusterError) as error:
            return pb.Controller(state="away", failure=str(error)), None
        return fleet_messages.controller_to_message(fleet), fleet

    async def _refuse(self, workers: Iterable[str], error: BatonError, context: Context) -> NoReturn:
        """Ends the call: NOT_FOUND if nobody supervises a worker of such a name, else as the error says."""
        _, fleet = await self._controller()
        if isinstance(error, FleetError) and fleet is not None:
            names = sorted((slot.name for slot in fleet.slots), key=fleet_messages.in_order)
            there = f"there are {', '.join(names)}" if names else "there is none"
            for worker in workers:
                if worker not in names:
                    await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker is called {worker!r}; {there}")
        await abort_call(context, error)

    def _control(self) -> FleetControl:
        if self._fleet_control is None:
            raise FleetError(
                "this gateway was started without a controller: its workers are started and stopped by "
                "whoever runs them, one by one"
            )
        return self._fleet_control


def _role_from(text: str) -> WorkerRole:
    try:
        return WorkerRole(text)
    except ValueError:
        roles = " or ".join(role.value for role in WorkerRole)
        raise InvalidRequest("role", f"got {text!r}; a worker's role is {roles}") from None
