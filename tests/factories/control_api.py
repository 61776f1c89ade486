"""A control server on a loopback port for a controller without processes, and a client of the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from baton.errors import FleetError
from baton.fleet import FleetView, GatewayReport
from baton.messages.control import (
    BeginRollout,
    ControlApi,
    ControlRequest,
    Done,
    FleetConfiguration,
    GetConfiguration,
    ReportLoad,
    ScaleRole,
    WaitView,
)
from baton.system.curve import PlaneKeys, derive_keys
from baton.worker import WorkerEndpoint
from cluster.control_api.calls import ControlClient, InProcessControl
from cluster.control_api.configuration import keys_digest, pack_configuration
from cluster.control_api.server import ControlServer
from cluster.control_api.zmq_carrier import control_client
from cluster.controller.controller import Controller
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.security import FLEET_KEYS, SECRET

TIMEOUT_S = 60.0
MODEL_PATH = Path("/models/tiny")


def packed(config: BatonConfig, model_path: Path = MODEL_PATH) -> FleetConfiguration:
    return pack_configuration(config, model_path, keys_digest(derive_keys(SECRET)))


def in_process(
    controller: Controller, config: BatonConfig, model_path: Path = MODEL_PATH
) -> InProcessControl:
    return InProcessControl(controller, packed(config, model_path))


@asynccontextmanager
async def control_server(
    config: BatonConfig,
    control: Controller | ControlApi | None,
    *,
    keys: PlaneKeys | None = FLEET_KEYS,
    model_path: Path = MODEL_PATH,
) -> AsyncIterator[ControlServer]:
    """An open control server. Without a controller, its fleet is still starting."""
    if isinstance(control, Controller):
        control = in_process(control, config, model_path)
    server = ControlServer(config.network, config.cluster.fleet_port, keys)
    server.open()
    try:
        if control is not None:
            await server.serve(control)
        yield server
    finally:
        await server.close(0.0)


@asynccontextmanager
async def client_of(
    server: ControlServer, config: BatonConfig, keys: PlaneKeys | None = FLEET_KEYS
) -> AsyncIterator[ControlClient]:
    async with control_client(server.address, keys, config.network) as client:
        yield client


def port_of(server: ControlServer) -> int:
    return int(server.address.rpartition(":")[2])


class StandingFleet(FakeFleetControl):
    """A controller whose workers always serve, and are those that a test names."""

    def __init__(self, configuration: FleetConfiguration, *endpoints: WorkerEndpoint) -> None:
        super().__init__(fleet_of(*[replica(endpoint.ref.name, endpoint.role) for endpoint in endpoints]))
        self._configuration = configuration
        self._view = FleetView("c-incarnation", 1, endpoints)
        self.reports: list[GatewayReport] = []

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        match request:
            case GetConfiguration():
                return self._configuration
            case WaitView(controller_incarnation, version, wait_s):
                if (controller_incarnation, version) == ("c-incarnation", 1):
                    await asyncio.sleep(wait_s)
                return self._view
            case ReportLoad(report):
                self.reports.append(report)
                return Done()
            case ScaleRole(role, count):
                self.commands.append(("scale", role.value, str(count)))
                return Done()
            case BeginRollout():
                raise FleetError("no worker is restarted here")
        return await super()._answer(request)
