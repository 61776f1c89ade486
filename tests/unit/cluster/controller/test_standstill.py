"""A controller whose process stood still: which timeouts ignore that, and what it still notices."""

import asyncio
from typing import Any, TypeVar

import pytest

from baton.errors import ClusterError
from baton.messages.control import ControlRequest, StartReport, WaitStart
from cluster.control_api.owner import first_start
from tests.factories.fleet import fleet, fleet_config
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

R = TypeVar("R")

STOOD_S = 60.0
PING_S = 1.0
UNRESPONSIVE_S = 2.0


@in_virtual_time
async def test_workers_live_on_and_are_watched_as_before() -> None:
    async with fleet(fleet_config(unresponsive_timeout_s=UNRESPONSIVE_S)) as tested:
        await tested.all_serve(3)
        for incarnation in tested.launcher.incarnations:
            incarnation.num_hops = 5
        for _ in range(3):
            await asyncio.sleep(0.75)
            virtual_loop().stand_still(STOOD_S)
        await asyncio.sleep(2 * UNRESPONSIVE_S)
        assert set((await tested.states()).values()) == {"serving"}
        assert len(tested.launcher.incarnations) == 3
        tested.launcher.latest("w0").is_frozen = True
        await asyncio.sleep(0.6 + PING_S + UNRESPONSIVE_S)  # an answer may be under way
        assert tested.launcher.latest("w0").number == 2, "a worker that hangs is still noticed in time"


@in_virtual_time
async def test_a_worker_that_died_meanwhile_is_replaced_at_once() -> None:
    async with fleet(fleet_config(unresponsive_timeout_s=UNRESPONSIVE_S)) as tested:
        before = await tested.all_serve(3)
        virtual_loop().stand_still(STOOD_S)
        tested.launcher.latest("w1").kill()
        await asyncio.sleep(0.1)
        after = await tested.until(lambda known: "w1" in known and known["w1"] != before["w1"])
        assert {name for name in after if after[name] != before[name]} == {"w1"}


@in_virtual_time
async def test_a_worker_that_hung_meanwhile_is_killed_soon() -> None:
    async with fleet(fleet_config(unresponsive_timeout_s=UNRESPONSIVE_S)) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w1").is_frozen = True
        await asyncio.sleep(0.5)
        virtual_loop().stand_still(STOOD_S)
        await asyncio.sleep(PING_S + UNRESPONSIVE_S)
        assert tested.launcher.latest("w1").number == 2


@in_virtual_time
async def test_a_worker_that_starts_is_not_given_up() -> None:
    async with fleet(fleet_config(start_timeout_s=10.0)) as tested:
        before = await tested.all_serve(3)
        tested.launcher.prepare = lambda incarnation: incarnation.may_start.clear()
        tested.launcher.latest("w2").kill()
        await asyncio.sleep(1.0)
        virtual_loop().stand_still(STOOD_S)
        await asyncio.sleep(5.0)
        tested.launcher.latest("w2").may_start.set()
        await tested.until(lambda known: "w2" in known and known["w2"] != before["w2"])
        assert len(tested.launcher.incarnations) == 4


@in_virtual_time
async def test_a_fleet_is_no_orphan_for_it() -> None:
    async with fleet(fleet_config(orphan_timeout_s=10.0, ray_address="auto")) as tested:
        await tested.all_serve(3)
        orphaned = asyncio.create_task(tested.controller.orphaned())
        await asyncio.sleep(5.0)
        virtual_loop().stand_still(STOOD_S)
        await asyncio.sleep(2.0)
        assert not orphaned.done(), "no gateway could ask"
        await asyncio.sleep(3.0)
        assert orphaned.done(), "and none has asked since"


class SlowStart:
    """Something is new every second, and all is well in the end."""

    def __init__(self, num_reports: int) -> None:
        self.num_left = num_reports

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await self._answer(request)
        return answer

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        assert isinstance(request, WaitStart)
        if request.version >= 0:
            await asyncio.sleep(min(1.0, request.wait_s))
        self.num_left -= 1
        unready = (("w0", ""),) if self.num_left > 0 else ()
        return StartReport(request.version + 1, (), (), unready, (), None)


@in_virtual_time
async def test_the_command_that_starts_a_fleet_waits_for_as_long_as_it_runs() -> None:
    virtual_loop().call_later(2.5, virtual_loop().stand_still, STOOD_S)
    await first_start(SlowStart(6), 10.0, "no room", lambda *_: None)
    with pytest.raises(ClusterError, match="within 10 s"):
        await first_start(SlowStart(20), 10.0, "no room", lambda *_: None)
