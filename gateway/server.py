"""Gateway: composes the services into one gRPC server with health and reflection, and runs it."""

import asyncio
import secrets

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig
from baton.curve import PlaneKeys
from baton.errors import ConfigError
from baton.fleet import GatewayReport
from baton.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
)
from baton.worker import WorkerEndpoint
from gateway.cluster_service import ClusterService
from gateway.dispatcher import Dispatcher
from gateway.fleet_control import FleetControl
from gateway.generation_service import GenerationService, ServedModel
from gateway.journey import LoadFailurePolicy
from gateway.latency_window import MAX_WINDOW_S
from gateway.text import Tokenizer

SERVICES = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    cluster_service_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name,
)


class Gateway:
    """One door. All methods belong to one event loop; several gateways may stand side by side."""

    def __init__(
        self,
        config: GatewayConfig,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        prefix_key: bytes,
        load_failure_policy: LoadFailurePolicy,
        model: ServedModel,
        tokenizer: Tokenizer,
        clock: Clock,
        fleet_control: FleetControl | None = None,
    ) -> None:
        """`keys` of the request plane, which its workers have too; None where `network.security` is `none`.
        `prefix_key` is what they hash prefixes with.

        Operators' orders go to `fleet_control`; without one they are refused.
        """
        assert (keys is None) == (network.security == "none")
        self._config = config
        self._clock = clock
        self._incarnation = secrets.token_hex(8)
        self._dispatcher = Dispatcher(config, network, keys, prefix_key, load_failure_policy, clock)
        self._health = health.aio.HealthServicer()
        max_bytes = config.max_message_mib * 2**20
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", max_bytes),
                ("grpc.so_reuseport", 0),  # a port that is taken must be an error, not a coin toss
            ]
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(self._dispatcher, tokenizer, model), self._server
        )
        cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(
            ClusterService(self._dispatcher, model, fleet_control), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.grpc_port = 0

    async def start(self) -> None:
        """Binds the port and serves; ConfigError if the port is taken."""
        address = f"{self._config.host}:{self._config.grpc_port}"
        try:
            self.grpc_port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"gateway.grpc_port: cannot listen on {address}; is it in use?") from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        """From its first heartbeat on, the worker gets requests."""
        self._dispatcher.add_worker(endpoint)

    async def wait_for_worker(self, name: str) -> None:
        """Returns when an added worker can be given requests, or is lost; WorkerUnavailable if it refuses us."""
        await self._dispatcher.wait_for_worker(name)

    def remove_worker(self, name: str, reason: str) -> None:
        """The worker gets no more requests, and what it had is tried elsewhere."""
        self._dispatcher.remove_worker(name, reason)

    @property
    def num_ready(self) -> int:
        """Workers that are heard of."""
        clients = self._dispatcher.fleet.clients
        return sum(client.status is not None and not client.is_silent for client in clients)

    def report(self, window_s: float = MAX_WINDOW_S) -> GatewayReport:
        """What clients of the last `window_s` waited for, at most a minute, and what workers last said."""
        dispatcher = self._dispatcher
        seen = dispatcher.latencies.latencies(window_s, self._clock.now())
        heard = [client for client in dispatcher.fleet.clients if not client.is_silent]
        return GatewayReport(
            gateway=self._incarnation,
            window_s=min(window_s, MAX_WINDOW_S),
            num_queued=dispatcher.num_queued,
            oldest_queued_s=dispatcher.oldest_queued_s,
            num_in_flight=dispatcher.num_in_flight,
            num_finished=seen.num_finished,
            ttft_s=seen.ttft_s,
            itl_s=seen.itl_s,
            workers=tuple(client.status for client in heard if client.status is not None),
        )

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, gives running ones `grace_s` to end, then cancels them."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace_s)
        await self._dispatcher.stop()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        await asyncio.gather(*[self._health.set(name, status) for name in ("", *SERVICES)])
