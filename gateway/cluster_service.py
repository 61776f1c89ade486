"""ClusterService: the operators' calls."""

from typing import Any

import grpc.aio

from baton.v1 import cluster_service_pb2 as pb
from baton.v1 import cluster_service_pb2_grpc as pb_grpc
from gateway import convert
from gateway.dispatcher import Dispatcher
from gateway.generation_service import ServedModel


class ClusterService(pb_grpc.ClusterServiceServicer):
    """Tells what the gateway knows of the fleet."""

    def __init__(self, dispatcher: Dispatcher, model: ServedModel) -> None:
        self._dispatcher = dispatcher
        self._model = model

    async def DescribeCluster(  # noqa: N802
        self,
        request: pb.DescribeClusterRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> pb.DescribeClusterResponse:
        return pb.DescribeClusterResponse(
            model=self._model.name,
            model_path=self._model.path,
            workers=[convert.worker_to_message(client) for client in self._dispatcher.fleet.clients],
            gateway=convert.gateway_to_message(self._dispatcher.num_in_flight, self._dispatcher.paths),
        )
