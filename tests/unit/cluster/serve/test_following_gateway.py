"""FollowingGateway: what happens before a gateway's ports are open."""

import asyncio
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from baton.config import BatonConfig
from baton.errors import ConfigError
from baton.kv import WorkerRef
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.serve import following_gateway
from cluster.serve.following_gateway import FollowingGateway
from gateway import Gateway
from gateway.workers.connections import WorkerConnections
from tests.factories.control_api import StandingFleet, packed
from tests.factories.observed_fleet import gateway_report


async def test_c58_memory_is_settled_before_a_client_can_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Mock()
    monkeypatch.setattr(following_gateway, "settle", settle)

    class TakenPort:
        workers: Any = None

        async def start(self) -> None:
            settle.assert_called_once()
            raise ConfigError("the port is in use")

    control: Any = None
    starting = FollowingGateway(BatonConfig(), cast("Gateway", TakenPort()), control)
    with pytest.raises(ConfigError):
        await starting.start()


@pytest.mark.parametrize(("grow_after_s", "window_s"), [(15.0, 15.0), (0.5, 2.0), (0.0, 2.0)])
async def test_a_report_covers_some_seconds_even_if_the_fleet_grows_at_once(
    grow_after_s: float, window_s: float
) -> None:
    scaling = {"mode": "on", "max_decode": 4, "interval_s": 0.01, "grow_after_s": grow_after_s}
    config = BatonConfig.from_mapping({"autoscaling": scaling})
    ref = WorkerRef("w0", "1", ("tcp://127.0.0.1:1",), 16)
    decode = WorkerEndpoint(ref, WorkerRole.DECODE, "tcp://127.0.0.1:2", "here", 1)
    fleet = StandingFleet(packed(config), decode)
    gateway = AsyncMock(spec=Gateway)
    gateway.workers, gateway.model_name = AsyncMock(spec=WorkerConnections), "tiny"
    gateway.report = Mock(return_value=gateway_report())
    following = FollowingGateway(config, gateway, fleet)
    await following.start()
    await following.use(asyncio.sleep(0))
    fleet.reports.clear()  # it reports until it is stopped
    async with asyncio.timeout(60.0):
        while not fleet.reports:
            await asyncio.sleep(0.01)
    await following.stop(asyncio.Event())
    gateway.report.assert_called_with(window_s)
