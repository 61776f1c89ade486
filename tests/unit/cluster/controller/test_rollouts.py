"""Rollouts: one worker after the other is replaced, beside its old process if there is room; and what may happen
during a rollout."""

import asyncio

import pytest

from baton.errors import ClusterError, FleetError
from tests.factories.fleet import FakeIncarnation, FakeLauncher, fleet, fleet_config
from tests.factories.virtual_loop import in_virtual_time, virtual_loop


async def test_a_rollout_restarts_one_worker_after_the_other() -> None:
    async with fleet(fleet_config()) as tested:
        before = await tested.all_serve(3)
        steps = [step async for step in tested.controller.rollout()]
        assert [(step.worker, step.done, step.count) for step in steps] == [
            ("w0", 1, 3),
            ("w1", 2, 3),
            ("w2", 3, 3),
        ]
        renewed = {step.worker: step.incarnation for step in steps}
        after = await tested.until(lambda known: renewed == {n: e.ref.incarnation for n, e in known.items()})
        assert all(before[name].pid != after[name].pid for name in before)
        for incarnation in tested.launcher.incarnations[:3]:
            assert incarnation.commands[:2] == ["drain 0", "stop 5"]
        assert len(tested.launcher.incarnations) == 6
        twice = [step.worker async for step in tested.controller.rollout(("w2", "w0", "w2"))]
        assert twice == ["w2", "w0"]


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_rollout_leaves_out_who_is_drained_meanwhile(is_gone: bool) -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        rolling = tested.controller.rollout()
        assert (await anext(rolling)).worker == "w0"
        leaving = tested.launcher.latest("w1")
        leaving.may_drain.clear()
        draining = asyncio.create_task(tested.controller.drain("w1"))
        await asyncio.sleep(0)
        if is_gone:
            leaving.may_drain.set()
            await draining
        assert [step.worker async for step in rolling] == ["w2"]
        leaving.may_drain.set()
        await draining


async def test_with_room_the_new_incarnation_is_ready_before_the_old_one_drains() -> None:
    launcher = FakeLauncher()
    async with fleet(fleet_config(prefill=0, decode=1), launcher) as tested:
        await tested.all_serve(1)
        launcher.has_spare_room = True
        old = launcher.latest("w0")
        old.may_drain.clear()
        rolling = asyncio.ensure_future(anext(tested.controller.rollout()))
        await tested.state_becomes("w0", "draining")
        assert launcher.alive == [old, launcher.latest("w0")]
        with pytest.raises(FleetError, match="a rollout is under way, at worker w0"):
            await anext(tested.controller.rollout())
        old.may_drain.set()
        assert (await rolling).incarnation == launcher.latest("w0").endpoint.ref.incarnation
        assert len(launcher.incarnations) == 2
    assert launcher.latest("w0").commands == ["stop 5"]


@in_virtual_time
async def test_a_rollout_stops_with_an_error_when_a_new_incarnation_fails() -> None:
    launcher = FakeLauncher()
    config = fleet_config(decode=3, restart_delay_s=5.0, restart_delay_max_s=5.0)
    async with fleet(config, launcher) as tested:
        await tested.all_serve(4)

        def broken(incarnation: FakeIncarnation) -> None:
            incarnation.start_error = (
                ClusterError("the driver is too old") if incarnation.name == "w2" else None
            )

        launcher.prepare = broken
        rolling = tested.controller.rollout()
        assert (await anext(rolling)).worker == "w0"
        await tested.controller.drain("w1")  # the rollout skips it, and does not count it
        with pytest.raises(
            FleetError, match=r"restarting 1 of 4 workers: worker w2 does not serve \(\w+ \w+\): the driver"
        ):
            await anext(rolling)
        assert virtual_loop().now() < 1.0, "it does not wait for the next try"
        assert launcher.latest("w3").number == 1


async def test_a_new_incarnation_that_fails_beside_the_old_one_costs_nothing() -> None:
    launcher = FakeLauncher()
    async with fleet(fleet_config(), launcher) as tested:
        before = await tested.all_serve(3)
        launcher.has_spare_room = True
        launcher.prepare = lambda incarnation: setattr(
            incarnation, "start_error", ClusterError("bad weights")
        )
        with pytest.raises(
            FleetError, match="restarting 0 of 3 workers: no new incarnation of worker w0: bad weights"
        ):
            await anext(tested.controller.rollout())
        assert await tested.all_serve(3) == before
        assert sorted(incarnation.name for incarnation in launcher.alive) == ["w0", "w1", "w2"]


async def test_a_worker_that_dies_while_its_next_incarnation_starts_leaves_no_orphan() -> None:
    """The replica already starts a replacement when the rollout's new incarnation is ready."""
    launcher = FakeLauncher()
    async with fleet(fleet_config(prefill=0, decode=1), launcher) as tested:
        before = (await tested.all_serve(1))["w0"].ref.incarnation
        launcher.has_spare_room = True
        launcher.room.clear()
        rolling = asyncio.ensure_future(anext(tested.controller.rollout()))
        await asyncio.sleep(0.02)  # it waits for room
        launcher.latest("w0").kill()
        await tested.state_becomes("w0", "placing")  # so does the replacement, behind it
        launcher.room.set()
        step = await rolling
        known = await tested.until(lambda known: "w0" in known and known["w0"].ref.incarnation != before)
        assert step.incarnation == known["w0"].ref.incarnation
        await asyncio.sleep(0.05)
        (alive,) = launcher.alive
        assert alive.endpoint.ref.incarnation == step.incarnation
        assert (await tested.states())["w0"] == "serving"
        alive.kill()
        known = await tested.until(lambda known: "w0" in known and known["w0"].pid != alive.pid)
        assert known["w0"] == launcher.latest("w0").endpoint, "not the one that was not needed"


async def test_a_rollout_of_a_worker_that_is_just_being_ended_waits_for_its_successor() -> None:
    """The end of the former incarnation is no failure of the next one."""
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        dead = tested.launcher.latest("w1")
        dead.may_stop.clear()
        dead.kill()
        await tested.all_serve(2)
        rolling = asyncio.ensure_future(anext(tested.controller.rollout(("w1",))))
        await asyncio.sleep(0)
        dead.may_stop.set()
        assert (await rolling).worker == "w1"
        assert tested.launcher.latest("w1").number == 3


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_fleet_that_ends_while_a_next_incarnation_starts_leaves_none(is_ready: bool) -> None:
    launcher = FakeLauncher()
    async with fleet(fleet_config(prefill=0, decode=1), launcher) as tested:
        await tested.all_serve(1)
        launcher.has_spare_room = True
        launcher.latest("w0").may_drain.clear()
        loads = asyncio.Event()

        def slow(incarnation: FakeIncarnation) -> None:
            incarnation.may_start = loads

        launcher.prepare = slow
        await tested.controller.rollouts.begin_rollout(())
        async with asyncio.timeout(60.0):
            while len(launcher.incarnations) < 2:
                await asyncio.sleep(0.005)
        if is_ready:
            loads.set()
            await tested.state_becomes("w0", "draining")
        await tested.controller.shutdown(may_drain=False)
        loads.set()
        await asyncio.sleep(0.01)
        assert launcher.alive == []
