"""A fleet's door on a loopback port over a controller that has no processes, and a client of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from baton.errors import FleetError
from baton.fleet import FleetView, GatewayReport, RolloutStep
from baton.system.curve import PlaneKeys
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.control_api.client import FleetClient
from cluster.control_api.server import FleetDoor
from cluster.controller.control import ControllerCalls
from tests.factories.fleet_control import FakeFleetControl, fleet_of, slot
from tests.factories.security import FLEET_KEYS

TIMEOUT_S = 60.0
MODEL_PATH = Path("/models/tiny")


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), TIMEOUT_S))

    return run


@asynccontextmanager
async def door_of(
    config: BatonConfig,
    control: ControllerCalls | None,
    *,
    keys: PlaneKeys | None = FLEET_KEYS,
    model_path: Path = MODEL_PATH,
) -> AsyncIterator[FleetDoor]:
    """Open; without a controller it is one whose fleet is still starting."""
    door = FleetDoor(config, model_path, keys)
    door.open()
    try:
        if control is not None:
            await door.serve(control)
        yield door
    finally:
        await door.close(0.0)


@asynccontextmanager
async def client_of(
    door: FleetDoor, config: BatonConfig, keys: PlaneKeys | None = FLEET_KEYS
) -> AsyncIterator[FleetClient]:
    async with FleetClient(door.address, keys, config.network) as client:
        yield client


def port_of(door: FleetDoor) -> int:
    return int(door.address.rpartition(":")[2])


class StandingFleet(FakeFleetControl):
    """A controller whose workers serve for ever, and are what a test says."""

    def __init__(self, *endpoints: WorkerEndpoint) -> None:
        super().__init__(fleet_of(*[slot(endpoint.ref.name, endpoint.role) for endpoint in endpoints]))
        self._view = FleetView("c-life", 1, endpoints)
        self.reports: list[GatewayReport] = []

    async def next_view(self, controller_incarnation: str, version: int, timeout_s: float) -> FleetView:
        if (controller_incarnation, version) == ("c-life", 1):
            await asyncio.sleep(timeout_s)
        return self._view

    async def report(self, report: GatewayReport) -> None:
        self.reports.append(report)

    async def scale(self, role: WorkerRole, count: int) -> None:
        self.orders.append(("scale", role.value, str(count)))

    async def begin_rollout(self, workers: tuple[str, ...]) -> str:
        raise FleetError("nobody is restarted here")

    async def rollout_step(self, rollout_id: str, index: int) -> RolloutStep | None:
        raise FleetError("nobody is restarted here")
