"""The fleet's file asks for other numbers of workers while the fleet runs."""

import asyncio
import logging
from typing import TypeVar

import pytest

from baton.config import BatonConfig
from baton.errors import FleetError
from baton.messages.control import ControlRequest, Done, ScaleRole
from baton.worker import WorkerRole
from cluster.controller.fleet_counts import follow_counts, scale_to

R = TypeVar("R")


class Fleet:
    """Notes what it is scaled to; refuses as often as `refusals` says."""

    def __init__(self, refusals: int = 0) -> None:
        self.commands: list[tuple[WorkerRole, int]] = []
        self._refusals = refusals

    async def call(self, request: ControlRequest[R]) -> R:
        assert isinstance(request, ScaleRole)
        self.commands.append((request.role, request.count))
        if self._refusals:
            self._refusals -= 1
            raise FleetError("not now")
        return Done()  # type: ignore[return-value]


def config(prefill: int, decode: int, **sections: object) -> BatonConfig:
    return BatonConfig.from_mapping({"cluster": {"prefill": prefill, "decode": decode}, **sections})


def follow(fleet: Fleet, begun_as: BatonConfig, *later: BatonConfig) -> None:
    """Until it has looked at each of these twice."""

    async def run() -> None:
        looks = iter([look for each in later for look in (each, each)])
        is_over = asyncio.Event()
        loop = asyncio.get_running_loop()
        last = begun_as

        def read() -> BatonConfig:
            nonlocal last
            try:
                last = next(looks)
            except StopIteration:
                loop.call_soon_threadsafe(is_over.set)
            return last

        following = asyncio.create_task(follow_counts(read, begun_as, fleet, look_every_s=0.001))
        async with asyncio.timeout(60.0):
            await is_over.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_the_fleet_is_scaled_once_for_each_change() -> None:
    fleet = Fleet()
    follow(fleet, config(1, 1), config(1, 1), config(2, 4), config(2, 3))
    assert fleet.commands == [(WorkerRole.PREFILL, 2), (WorkerRole.DECODE, 4), (WorkerRole.DECODE, 3)]


def test_an_adopted_fleet_gets_all_counts_whatever_it_began_with() -> None:
    """It may have grown or shrunk since."""
    fleet, scaled = Fleet(), Fleet()
    asyncio.run(scale_to(config(1, 2), None, fleet))
    assert fleet.commands == [(WorkerRole.PREFILL, 1), (WorkerRole.DECODE, 2)]
    scaling = {"mode": "on", "min_decode": 1, "max_decode": 8}
    asyncio.run(scale_to(config(1, 2, autoscaling=scaling), None, scaled))
    assert scaled.commands == []


def test_what_is_refused_is_tried_again() -> None:
    fleet = Fleet(refusals=1)
    follow(fleet, config(1, 1), config(1, 2))
    assert fleet.commands == [(WorkerRole.DECODE, 2)] * 2


def test_autoscaling_begins_there_and_goes_its_own_way() -> None:
    fleet, scaling = Fleet(), {"mode": "on", "min_decode": 1, "max_decode": 8}
    follow(fleet, config(1, 1, autoscaling=scaling), config(1, 4, autoscaling=scaling))
    assert fleet.commands == []


def test_what_makes_another_fleet_is_said_and_counts_later(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    with caplog.at_level(logging.WARNING):
        follow(fleet, config(1, 1), config(1, 2, model={"dtype": "float32"}))
    assert fleet.commands == [(WorkerRole.DECODE, 2)]
    (message,) = caplog.messages
    assert "model.dtype is 'auto' there, 'float32' here" in message
    assert "restart the fleet to apply this" in message
