"""A gateway that follows a fleet's workers, from its start to its last request; starts no worker."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.messages.control import ControlApi
from baton.system.garbage import settle
from baton.system.hosts import in_url
from baton.system.signals import either, unless
from baton.system.tasks import end_tasks
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.control_api.follower import POLL_S, ViewedWorkers, ViewFollower, keep_reporting

if TYPE_CHECKING:
    from gateway import Gateway


@dataclass(frozen=True, slots=True)
class Service:
    """A gateway that answers requests."""

    target: str
    """`host:port` of the gRPC frontend."""
    http: str | None
    """`host:port` of the HTTP frontend; None if there is none."""
    endpoints: tuple[WorkerEndpoint, ...]
    model: str
    """The model's name in requests."""
    uses_tls: bool = False
    asks_for_certificate: bool = False
    """Clients need a certificate of their own."""
    asks_for_key: bool = False


WhileReady = Callable[[Service], Awaitable[None]]


class FollowingGateway:
    """A gateway, and the tasks that follow its fleet. `stop` may be called after any outcome of `start`."""

    def __init__(
        self,
        config: BatonConfig,
        gateway: "Gateway",
        control: ControlApi,
        *,
        is_beside_controller: bool = False,
    ) -> None:
        """`is_beside_controller`: see ViewedWorkers."""
        self._config = config
        self._gateway = gateway
        self._control = control
        workers = ViewedWorkers(gateway.workers, is_beside_controller=is_beside_controller)
        self._follower = ViewFollower(control, workers.apply)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Service:
        """Returns once a decode worker serves, and each serving worker is connected or lost.

        ClusterError if no decode worker serves in time; WorkerUnavailable if a worker and this gateway refuse each
        other.
        """
        gateway = self._gateway
        settle()  # takes half a second, so call it before clients can connect
        await gateway.start()
        endpoints, _ = await asyncio.gather(self._wait_for_decode_worker(), gateway.warm_up())
        await asyncio.gather(*[gateway.workers.wait_for_worker(endpoint.ref.name) for endpoint in endpoints])
        self._tasks.append(asyncio.create_task(self._follower.run(), name="follow the fleet"))
        scaling = self._config.autoscaling
        if scaling.mode != "off":
            report = partial(gateway.report, scaling.latency_window_s)
            reporting = keep_reporting(self._control, report, scaling.interval_s)
            self._tasks.append(asyncio.create_task(reporting, name="report to the fleet"))
        config = self._config.gateway
        host = in_url(config.host)
        http = None if gateway.http_port is None else f"{host}:{gateway.http_port}"
        return Service(
            f"{host}:{gateway.grpc_port}",
            http,
            endpoints,
            gateway.model_name,
            uses_tls=config.tls is not None,
            asks_for_certificate=config.tls is not None and config.tls.client_ca_file is not None,
            asks_for_key=config.has_keys and not config.allow_anonymous,
        )

    async def use(self, work: Awaitable[None]) -> None:
        """Returns when `work` ends. Raises FleetEnded if the fleet ends first."""
        await either(work, *map(asyncio.shield, self._tasks))  # the gateway follows its fleet until `stop`

    async def stop(self, hurry: asyncio.Event) -> None:
        """Accepts no new requests; running requests get `cluster.drain_timeout_s`, unless `hurry` is set."""
        if not await unless(hurry, self._gateway.stop(self._config.cluster.drain_timeout_s)):
            await self._gateway.stop(0.0)
        await end_tasks(*self._tasks)

    async def _wait_for_decode_worker(self) -> tuple[WorkerEndpoint, ...]:
        timeout_s = self._config.cluster.start_timeout_s
        view = await self._follower.catch_up(0.0)
        try:
            async with asyncio.timeout(timeout_s):
                while not any(endpoint.role is WorkerRole.DECODE for endpoint in view.endpoints):
                    view = await self._follower.catch_up(POLL_S)
        except TimeoutError:
            raise ClusterError(
                f"no decode worker of the fleet served within {timeout_s:g} s (cluster.start_timeout_s)"
            ) from None
        return view.endpoints


def stopping_text(config: BatonConfig) -> str:
    return f"running requests have {config.cluster.drain_timeout_s:g} s to end; Ctrl-C again ends them now"
